"""Which kernel serves which types, and which block of a launch works on which elements: all without a GPU.

A chunk table is built once for a bucket, with numpy, and stays in device memory. Only the tensors' addresses
may change from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

THREADS = 256
"""Threads of a block; ``kThreads`` in kernels.cu."""

SOURCE = Path(__file__).parent / "kernels.cu"

MOST_BLOCKS = 2**31 - 1

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

COPIES = frozenset("f32_f32 f64_f64 f16_f16 bf16_bf16 f32_f16 f32_bf16 f64_f16 f64_bf16".split())

BLOCK, BLOCK_BYTES = 256, 260
"""Elements that one scale serves, and the bytes that stand for them: ``kBlock`` in block_codes.h."""

# By the type that gradients are quantised to; a torch without fp8 does not ask for it.
CODES = {torch.int8: "qi8", getattr(torch, "float8_e4m3fn", None): "qf8"}

# Bytes, of the larger type, that a thread has under way: 8 loads of 16 bytes (kUnroll and kWidth in copy.h).
_UNDER_WAY = 128


def pack_kernel(source: torch.dtype, target: torch.dtype) -> str:
    """The name of the kernel that packs tensors of one type into a bucket of another."""
    pair = f"{SHORT.get(source, source)}_{SHORT.get(target, target)}"
    if pair not in COPIES:
        raise ValueError(
            f"there is no kernel that packs {source} into {target}; there are {', '.join(sorted(COPIES))}"
        )
    return f"pack_{pair}"


def chunk_elements(*types: torch.dtype) -> int:
    """How many elements one block takes: one round of all loads that its threads have under way together.

    Larger chunks leave a large GPU half idle while the last blocks run. For the tensors of ResNet-50,
    BERT-large and GPT-2 an H200 packed float32 with 0.99, 0.91 and 0.96 of a copy's bandwidth; with half of
    this 0.94, 0.89 and 0.93; with eight times as much 0.88, 0.81 and 0.92.
    """
    return THREADS * _UNDER_WAY // max(kind.itemsize for kind in types)


Table = npt.NDArray[np.int64]
"""One row for each chunk: tensor, offset in the tensor, place in the bucket, elements (``Chunk`` in
copy.h).
"""


@dataclass(frozen=True)
class Region:
    """Elements ``[offset, offset + count)`` of a tensor (by its number), at ``at`` in the bucket."""

    tensor: int
    offset: int
    at: int
    count: int


def chunk_table(regions: Sequence[Region], elements: int) -> Table:
    """The regions cut into chunks of at most ``elements``.

    Cuts stand at multiples of ``elements`` from each region's start, so aligned regions have aligned chunks.
    """
    for region in regions:
        if min(region.tensor, region.offset, region.at, region.count) < 0:
            raise ValueError(f"a region has no negative numbers, got {region}")
    counts = np.array([region.count for region in regions], np.int64)
    chunks = -(-counts // elements)
    if chunks.sum() > MOST_BLOCKS:
        raise ValueError(
            f"{counts.sum()} elements in chunks of {elements} are more than {MOST_BLOCKS} blocks"
        )
    owner = np.repeat(np.arange(len(regions)), chunks)
    first = np.cumsum(chunks) - chunks
    start = (np.arange(len(owner)) - first[owner]) * elements
    fields = np.array([(r.tensor, r.offset, r.at) for r in regions], np.int64).reshape(-1, 3)[owner]
    table = np.empty((len(owner), 4), np.int64)
    table[:, 0] = fields[:, 0]
    table[:, 1] = fields[:, 1] + start
    table[:, 2] = fields[:, 2] + start
    table[:, 3] = np.minimum(elements, counts[owner] - start)
    return table


def one_after_another(numels: Sequence[int]) -> list[Region]:
    """Whole tensors without gaps: what ``torch.cat`` would make."""
    starts = np.cumsum([0, *numels])[:-1].tolist()
    every = (Region(i, 0, *place) for i, place in enumerate(zip(starts, numels, strict=True)))
    return [region for region in every if region.count]
