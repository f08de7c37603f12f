"""The public collectives that move tensors as they are, and waiting; with Horovod's signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commsched.collectives import autograd, state
from commsched.collectives.process_sets import ProcessSet, global_process_set, registered_id

Tensors = Sequence[torch.Tensor]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``allgather``."""
    return state.engine().allgather([tensor], name=name, set_id=registered_id(process_set), grouped=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, concatenated on the first dimension (whose size may differ);
    differentiable."""
    return autograd.Allgather.apply(name, process_set, False, tensor)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``grouped_allgather``."""
    return state.engine().allgather(list(tensors), name=name, set_id=registered_id(process_set), grouped=True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """``allgather`` of several tensors as one operation."""
    return autograd.Allgather.apply(name, process_set, True, *tensors)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast``."""
    return state.engine().broadcast(
        tensor, root_rank, name=name, set_id=registered_id(process_set), inplace=False
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Rank `root_rank`'s tensor, on every rank, in a new tensor; differentiable."""
    return autograd.Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_``."""
    return state.engine().broadcast(
        tensor, root_rank, name=name, set_id=registered_id(process_set), inplace=True
    )


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with rank `root_rank`'s."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall``; its result is always the pair (tensor, received splits)."""
    return state.engine().alltoall(tensor, _as_tensor(splits), name=name, set_id=registered_id(process_set))


def _as_tensor(splits: Any) -> torch.Tensor | None:
    if splits is None or isinstance(splits, torch.Tensor):
        return splits
    return torch.tensor(splits, dtype=torch.int32)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[i]`` rows of the tensor to rank i and return what the others sent; differentiable.

    Without `splits` all ranks get the same share and the result is one tensor; with it, the pair (tensor, how
    many rows came from each rank).
    """
    return autograd.Alltoall.apply(tensor, _as_tensor(splits), name, process_set)


def poll(handle: int) -> bool:
    """Whether an asynchronous operation has ended, so that ``synchronize`` will not wait."""
    return state.engine().poll(handle)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its result; ``CommError`` where it failed.

    What ``sparse_allreduce_async`` returned may be passed too.
    """
    return handle() if callable(handle) else state.engine().synchronize(handle)


def join(device: int = -1) -> int:
    """This rank has no more data: take part with zeros in the others' all-reduces until every rank has
    joined.

    Returns the rank that joined last. `device` is the GPU for the zeros (-1: CPU).
    """
    return state.engine().join(device)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set is here."""
    state.engine().barrier(registered_id(process_set))
