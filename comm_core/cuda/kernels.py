"""Which kernel serves which types, and how a launch is laid out: everything about it that needs no GPU."""

from __future__ import annotations

from pathlib import Path

import torch

THREADS = 256
"""Threads of a block; ``kThreads`` in kernels.cu."""

SOURCE = Path(__file__).parent / "kernels.cu"

MOST_BLOCKS = 2**31 - 1

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

COPIES = frozenset(
    (
        "f32_f32 f64_f64 f16_f16 bf16_bf16 f32_f16 f32_bf16"
        " f64_f16 f64_bf16 f16_f32 bf16_f32 f16_f64 bf16_f64"
    ).split()
)
UPDATES = frozenset("f32_f32 f16_f16 bf16_bf16 f32_f16 f32_bf16 f16_f32 bf16_f32".split())

# A chunk is one block's work. Enough of them to keep every processor of a large GPU busy, each large
# enough that
# starting a block does not count.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 16
_WANTED_CHUNKS = 2048


def copy_kernel(kind: str, source: torch.dtype, target: torch.dtype) -> str:
    """The name of the kernel that packs or unpacks from one type to another."""
    return _named(kind, source, target, COPIES)


def update_kernel(rule: str, grad: torch.dtype, weight: torch.dtype) -> str:
    """The name of the kernel that updates weights of a type with gradients of a type."""
    return _named(rule, grad, weight, UPDATES)


def _named(kind: str, first: torch.dtype, second: torch.dtype, known: frozenset[str]) -> str:
    pair = f"{SHORT.get(first, first)}_{SHORT.get(second, second)}"
    if pair not in known:
        raise ValueError(
            f"there is no kernel for {kind} of {first} and {second}; there are {', '.join(sorted(known))}"
        )
    return f"{kind}_{pair}"


def chunk_elements(total: int) -> int:
    """How many elements one block takes of a bucket of ``total``."""
    wanted = -(-total // _WANTED_CHUNKS)
    wanted = -(-wanted // _SMALLEST_CHUNK) * _SMALLEST_CHUNK
    return min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)
