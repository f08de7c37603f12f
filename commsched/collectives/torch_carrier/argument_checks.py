"""Checks of one rank's arguments that need no other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commsched.collectives.carrier import Collective, ReduceOp
from commsched.errors import CommError

_REDUCIBLE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
_MOVABLE = _REDUCIBLE | {torch.bool}


def check(collective: Collective, members: Sequence[int], job_size: int) -> None:
    """Raise an error if the collective can not run on `members`, whatever the other ranks pass."""
    kind, tensors, reduction = collective.kind, collective.tensors, collective.reduction
    check_tensors(kind, tensors, reduces=reduction is not None)
    if kind == "broadcast" and collective.root not in members:
        raise ValueError(
            f"broadcast's root_rank must be one of the ranks {list(members)}, but is {collective.root}"
        )
    if reduction is not None and reduction.op is ReduceOp.ADASUM:
        _check_adasum(collective, job_size)


def check_tensors(kind: str, tensors: Sequence[torch.Tensor], reduces: bool = False) -> None:
    """Check types, memory layout and that a group's tensors are on one device."""
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


def _check_adasum(collective: Collective, job_size: int) -> None:
    if collective.kind == "reducescatter":
        raise CommError("reducescatter can not use op=Adasum; use Sum, Average, Min, Max or Product")
    if collective.set_id != 0:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    if job_size & (job_size - 1):
        raise NotImplementedError(f"Adasum needs a power of two as number of ranks, but there are {job_size}")
    if any(not tensor.dtype.is_floating_point for tensor in collective.tensors):
        raise ValueError("Adasum needs floating-point tensors")


def row_splits(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> list[int]:
    """Return how many rows alltoall sends to each of `size` ranks: equal shares, or `splits` if they fit."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension that the {size} ranks divide evenly, but "
                f"it is {rows}; pass splits"
            )
        return [rows // size] * size
    if splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"alltoall's splits must be 32- or 64-bit integers, but are {splits.dtype}")
    parts: list[int] = splits.tolist()
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
