"""Horovod's collectives that move tensors unchanged: allgather, broadcast, alltoall."""

from __future__ import annotations

from typing import Any

import torch

from commsched.collectives import autograd
from commsched.collectives.handles import grouped, start, waiting
from commsched.collectives.process_sets import ProcessSet, global_process_set


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``allgather``."""
    return start("allgather", tensor, name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks on the first dimension, whose size may differ; differentiable."""
    if not isinstance(tensor, torch.Tensor):  # the tensors of a group
        return autograd.Allgather.apply(name, process_set, True, *tensor)
    return autograd.Allgather.apply(name, process_set, False, tensor)[0]


grouped_allgather_async = grouped(allgather_async, "Start ``grouped_allgather``.")
grouped_allgather = grouped(allgather, "``allgather`` of several tensors as one operation.")


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``."""
    return start("broadcast", tensor, name, process_set, root=root_rank)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank `root_rank`'s tensor, in a new tensor, on every rank; differentiable."""
    return autograd.Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``."""
    return start("broadcast", tensor, name, process_set, root=root_rank, inplace=True)


broadcast_ = waiting(broadcast_async_, "Overwrite the tensor with rank `root_rank`'s.")


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall``; its result is always the pair (tensor, received splits)."""
    return start("alltoall", tensor, name, process_set, splits=_as_tensor(splits))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[i]`` rows of the tensor to rank i and return the rows that arrive; differentiable.

    Without `splits` every rank gets the same share and the result is one tensor. With it, the result is the
    pair (tensor, number of rows that came from each rank).
    """
    received = autograd.Alltoall.apply(tensor, _as_tensor(splits), name, process_set)
    return received[0] if splits is None else received


def _as_tensor(splits: Any) -> torch.Tensor | None:
    if splits is None or isinstance(splits, torch.Tensor):
        return splits
    return torch.tensor(splits, dtype=torch.int32, device="cpu")
