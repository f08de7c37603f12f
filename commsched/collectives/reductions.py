"""Horovod's reductions: allreduce, sparse_allreduce and reducescatter in all their forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from commsched.collectives import autograd
from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.compression import Compression
from commsched.collectives.data_movement import allgather_async
from commsched.collectives.handles import grouped, start, synchronize, waiting
from commsched.collectives.process_sets import ProcessSet, global_process_set

# Plain integers, as in Horovod: scripts compare and store them.
Average, Sum, Adasum, Min, Max, Product = map(int, ReduceOp)


def _reduction(op: int | None, average: bool | None, prescale: float, postscale: float) -> Reduction:
    if average is not None:
        if op is not None:
            raise ValueError("pass either op or average, not both; average is the older one")
        warnings.warn("average= is deprecated, pass op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    try:
        return Reduction(ReduceOp(Average if op is None else op), float(prescale), float(postscale))
    except ValueError:
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, but is {op!r}") from None


def _compressed(
    kind: str, tensors: Any, compression: Any, reduction: Reduction, name: str | None, process_set: ProcessSet
) -> Any:
    """Run a differentiable reduction of a compressed tensor, or of several as one operation."""
    several = not isinstance(tensors, torch.Tensor)
    pairs = [compression.compress(tensor) for tensor in (tensors if several else [tensors])]
    small = [tensor for tensor, _ in pairs]
    results = autograd.Reduce.apply(kind, reduction, name, process_set, several, *small)
    restored = [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]
    return restored if several else restored[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce``; the result goes to a new tensor."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return start("allreduce", tensor, name, process_set, reduction=reduction)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Average a tensor over the ranks, or combine it by another `op`; differentiable.

    Inputs are multiplied by `prescale_factor`, results by `postscale_factor`. Shapes and types must be
    equal on all ranks.
    """
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _compressed("allreduce", tensor, compression, reduction, name, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce_``."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return start("allreduce", tensor, name, process_set, reduction=reduction, inplace=True)


allreduce_ = waiting(allreduce_async_, "``allreduce`` into the tensor itself; not differentiable.")


grouped_allreduce_async = grouped(allreduce_async, "Start ``grouped_allreduce``.")
grouped_allreduce = grouped(allreduce, "``allreduce`` of several tensors as one operation.")
grouped_allreduce_async_ = grouped(allreduce_async_, "Start ``grouped_allreduce_``.")
grouped_allreduce_ = waiting(grouped_allreduce_async_, "``grouped_allreduce`` into the tensors themselves.")


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum (or average) of sparse tensors; call the returned function to get the result."""
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1),
            all_values,
            tensor.size(),
            device=tensor.device,
            check_invariants=False,
        )

    return finish


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter``."""
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    return start("reducescatter", tensor, name, process_set, reduction=reduction)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """``allreduce``, but every rank gets only its part of the first dimension; differentiable.

    The first ranks get one row more if the number of ranks does not divide the rows.
    """
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    return _compressed("reducescatter", tensor, compression, reduction, name, process_set)


grouped_reducescatter_async = grouped(reducescatter_async, "Start ``grouped_reducescatter``.")
grouped_reducescatter = grouped(reducescatter, "``reducescatter`` of several tensors as one operation.")
