"""Chunk tables: which block of a launch works on which elements of which tensor.

Built once for a bucket, with numpy; the table stays in device memory. Only the tensors' addresses may change
from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from comm_core.cuda.kernels import MOST_BLOCKS, chunk_elements

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


def chunk_table(regions: Sequence[Region], elements: int | None = None) -> Table:
    """The regions cut into chunks of at most ``elements`` (chosen by the size of all of them).

    Cuts stand at multiples of ``elements`` from each region's start, so aligned regions have aligned chunks.
    """
    for region in regions:
        if min(region.tensor, region.offset, region.at, region.count) < 0:
            raise ValueError(f"a region has no negative numbers, got {region}")
    size = elements or chunk_elements(sum(region.count for region in regions))
    counts = np.array([region.count for region in regions], np.int64)
    chunks = -(-counts // size)
    if chunks.sum() > MOST_BLOCKS:
        raise ValueError(f"{counts.sum()} elements in chunks of {size} are more than {MOST_BLOCKS} blocks")
    owner = np.repeat(np.arange(len(regions)), chunks)
    first = np.cumsum(chunks) - chunks
    start = (np.arange(len(owner)) - first[owner]) * size
    fields = np.array([(r.tensor, r.offset, r.at) for r in regions], np.int64).reshape(-1, 3)[owner]
    table = np.empty((len(owner), 4), np.int64)
    table[:, 0] = fields[:, 0]
    table[:, 1] = fields[:, 1] + start
    table[:, 2] = fields[:, 2] + start
    table[:, 3] = np.minimum(size, counts[owner] - start)
    return table


def one_after_another(numels: Sequence[int]) -> list[Region]:
    """Whole tensors without gaps: what ``torch.cat`` would make."""
    starts = np.cumsum([0, *numels])[:-1].tolist()
    return [
        Region(i, 0, start, numel)
        for i, (start, numel) in enumerate(zip(starts, numels, strict=True))
        if numel
    ]
