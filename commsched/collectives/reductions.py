"""The public reductions: allreduce and reducescatter in all their forms, with Horovod's signatures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commsched.collectives import autograd
from commsched.collectives import current_carrier as state
from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.compression import Compression
from commsched.collectives.data_movement import allgather_async, synchronize
from commsched.collectives.process_sets import ProcessSet, global_process_set, registered_id

# Plain integers, as in Horovod: scripts compare and store them.
Average, Sum, Adasum, Min, Max, Product = (
    int(op)
    for op in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
)

Tensors = Sequence[torch.Tensor]


def _reduction(op: int | None, average: bool | None, prescale: float, postscale: float) -> Reduction:
    if average is not None:
        if op is not None:
            raise ValueError("pass either op or average, not both; average is the older one")
        warnings.warn("average= is deprecated, pass op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    try:
        return Reduction(ReduceOp(Average if op is None else op), float(prescale), float(postscale))
    except ValueError:
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, but is {op!r}") from None


def _allreduce(
    tensors: Tensors,
    reduction: Reduction,
    name: str | None,
    process_set: ProcessSet,
    *,
    inplace: bool,
    grouped: bool,
) -> int:
    return state.engine().allreduce(
        tensors, reduction, name=name, set_id=registered_id(process_set), inplace=inplace, grouped=grouped
    )


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
    return _allreduce(
        [tensor],
        _reduction(op, average, prescale_factor, postscale_factor),
        name,
        process_set,
        inplace=False,
        grouped=False,
    )


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
    """Average (or, as `op` says, otherwise combine) a tensor over the ranks; differentiable.

    The input is multiplied by `prescale_factor` before and by `postscale_factor` after. Shapes and types must
    be equal.
    """
    compressed, context = compression.compress(tensor)
    result = autograd.Allreduce.apply(
        _reduction(op, average, prescale_factor, postscale_factor), name, process_set, False, compressed
    )
    return compression.decompress(result, context)


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
    return _allreduce(
        [tensor],
        _reduction(op, average, prescale_factor, postscale_factor),
        name,
        process_set,
        inplace=True,
        grouped=False,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """``allreduce`` into the tensor itself; not differentiable."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce``."""
    return _allreduce(
        list(tensors),
        _reduction(op, average, prescale_factor, postscale_factor),
        name,
        process_set,
        inplace=False,
        grouped=True,
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """``allreduce`` of several tensors as one operation."""
    reduction = _reduction(op, average, prescale_factor, postscale_factor)
    return _compressed(
        tensors,
        compression,
        lambda small: autograd.Allreduce.apply(reduction, name, process_set, True, *small),
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce_``."""
    return _allreduce(
        list(tensors),
        _reduction(op, average, prescale_factor, postscale_factor),
        name,
        process_set,
        inplace=True,
        grouped=True,
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``grouped_allreduce`` into the tensors themselves."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _compressed(
    tensors: Tensors, compression: Any, run: Callable[[list[torch.Tensor]], Any]
) -> list[torch.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run([small for small, _ in pairs])
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)
    ]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum (or average) of sparse tensors; call what is returned to get the result."""
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), all_values, tensor.size(), check_invariants=False
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
    return state.engine().reducescatter(
        [tensor],
        _reduction(op, None, prescale_factor, postscale_factor),
        name=name,
        set_id=registered_id(process_set),
        grouped=False,
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """``allreduce`` of which every rank keeps its part of the first dimension; differentiable.

    Where the ranks do not divide the first dimension, the first ranks keep one row more.
    """
    compressed, context = compression.compress(tensor)
    result = autograd.Reducescatter.apply(
        _reduction(op, None, prescale_factor, postscale_factor), name, process_set, False, compressed
    )
    return compression.decompress(result, context)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter``."""
    return state.engine().reducescatter(
        list(tensors),
        _reduction(op, None, prescale_factor, postscale_factor),
        name=name,
        set_id=registered_id(process_set),
        grouped=True,
    )


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors as one operation."""
    reduction = _reduction(op, None, prescale_factor, postscale_factor)
    return _compressed(
        tensors,
        compression,
        lambda small: autograd.Reducescatter.apply(reduction, name, process_set, True, *small),
    )
