"""Checks of one rank's arguments that need no other rank: all of them raise ``ValueError``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MOVABLE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
}
_REDUCIBLE = _MOVABLE - {torch.bool}


def check_tensors(kind: str, tensors: Sequence[torch.Tensor], reduces: bool = False) -> None:
    """Types that can travel, contiguous memory, and one device for a group."""
    allowed = _REDUCIBLE if reduces else _MOVABLE
    if not tensors:
        raise ValueError(f"a grouped {kind} needs at least one tensor")
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{kind} needs a dense tensor, but got {tensor.layout}; see sparse_allreduce_async"
            )
        if tensor.dtype not in allowed:
            raise ValueError(
                f"{kind} does not support tensors of type {tensor.dtype}; cast it to one of "
                f"{', '.join(sorted(str(t).removeprefix('torch.') for t in allowed))}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} needs a contiguous tensor; pass tensor.contiguous()")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            f"a grouped {kind} needs all its tensors on one device, but got "
            f"{sorted({str(tensor.device) for tensor in tensors})}"
        )


def even_splits(tensor: torch.Tensor, size: int) -> list[int]:
    """The split of alltoall where none is given."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % size:
        raise ValueError(
            f"alltoall without splits needs a first dimension that the {size} ranks divide evenly, but it is "
            f"{rows}; pass splits"
        )
    return [rows // size] * size


def check_splits(tensor: torch.Tensor, splits: torch.Tensor, size: int) -> list[int]:
    """`splits` as a list, if it fits `tensor` and the number of ranks."""
    if splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"alltoall's splits must be 32-bit integers, but are {splits.dtype}")
    parts: list[int] = splits.tolist()
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits.dim() != 1 or len(parts) != size:
        raise ValueError(
            f"alltoall's splits need one entry for each of {size} ranks, but have shape {list(splits.shape)}"
        )
    if min(parts) < 0 or sum(parts) > rows:
        raise ValueError(
            "alltoall's splits must be at least 0 and add up to at most the tensor's first dimension, "
            f"{rows}, but are {parts}"
        )
    return parts
