"""Which kernel serves which types, and how a launch is laid out: everything about it that needs no GPU."""

from __future__ import annotations

from pathlib import Path

import torch

THREADS = 256
"""Threads of a block; ``kThreads`` in kernels.cu."""

SOURCE = Path(__file__).parent / "kernels.cu"

MOST_BLOCKS = 2**31 - 1

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

COPIES = frozenset("f32_f32 f64_f64 f16_f16 bf16_bf16 f32_f16 f32_bf16 f64_f16 f64_bf16".split())

# A chunk is one block's work. There are enough of them to keep every processor of a large GPU busy, and each
# is large enough that the start of a block takes little of its time.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 12, 1 << 16
_WANTED_CHUNKS = 2048


def pack_kernel(source: torch.dtype, target: torch.dtype) -> str:
    """The name of the kernel that packs tensors of one type into a bucket of another."""
    pair = f"{SHORT.get(source, source)}_{SHORT.get(target, target)}"
    if pair not in COPIES:
        raise ValueError(
            f"there is no kernel that packs {source} into {target}; there are {', '.join(sorted(COPIES))}"
        )
    return f"pack_{pair}"


def chunk_elements(total: int) -> int:
    """How many elements one block takes of a bucket of ``total``."""
    wanted = -(-total // _WANTED_CHUNKS)
    wanted = -(-wanted // _SMALLEST_CHUNK) * _SMALLEST_CHUNK
    return min(max(wanted, _SMALLEST_CHUNK), _LARGEST_CHUNK)
