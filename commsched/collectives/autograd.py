"""Gradients through the collectives, the same over every engine.

Horovod's convention: a script's loss is the average over the ranks, so the gradients of what one rank gave to
all (allgather, broadcast) are averaged on their way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from commsched.collectives import current_carrier as state
from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.process_sets import ProcessSet, registered_id

_AVERAGE = Reduction(ReduceOp.AVERAGE)
_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)


def _reduce(
    tensors: list[torch.Tensor], reduction: Reduction, process_set: ProcessSet, grouped: bool
) -> tuple[Any, ...]:
    engine = state.engine()
    result = engine.synchronize(
        engine.allreduce(
            [t.contiguous() for t in tensors],
            reduction,
            name=None,
            set_id=registered_id(process_set),
            inplace=False,
            grouped=grouped,
        )
    )
    return tuple(result) if grouped else (result,)


def _gather(
    tensors: list[torch.Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> tuple[Any, ...]:
    engine = state.engine()
    result = engine.synchronize(
        engine.allgather(tensors, name=name, set_id=registered_id(process_set), grouped=grouped)
    )
    return tuple(result) if grouped else (result,)


def _check_differentiable(kind: str, reduction: Reduction) -> None:
    if reduction.op not in _LINEAR:
        raise NotImplementedError(
            f"{kind} with op={reduction.op.name.title()} has no gradient here; use Average or Sum, or pass "
            "tensor.detach()"
        )


class Allreduce(Function):
    """One tensor, or several as one operation."""

    @staticmethod
    def forward(
        ctx: Any,
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = (reduction, process_set, grouped)
        engine = state.engine()
        return engine.synchronize(
            engine.allreduce(
                tensors,
                reduction,
                name=name,
                set_id=registered_id(process_set),
                inplace=False,
                grouped=grouped,
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduction, process_set, grouped = ctx.arguments
        _check_differentiable("allreduce", reduction)
        return (None, None, None, None, *_reduce(list(gradients), reduction, process_set, grouped))


class Allgather(Function):
    """One tensor, or several as one operation."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> Any:
        ctx.arguments = (process_set, grouped)
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        results = _gather(list(tensors), name, process_set, grouped)
        return results if grouped else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set, grouped = ctx.arguments
        averaged = _reduce(list(gradients), _AVERAGE, process_set, grouped)
        (all_rows,) = _gather([torch.tensor([ctx.rows])], None, process_set, False)
        before = all_rows[: process_set.rank()].sum(dim=0).tolist()
        mine = (
            gradient.narrow(0, start, rows)
            for gradient, start, rows in zip(averaged, before, ctx.rows, strict=True)
        )
        return (None, None, None, *mine)


class Broadcast(Function):
    """All of the gradient goes back to the root."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.arguments = (root, process_set)
        engine = state.engine()
        return engine.synchronize(
            engine.broadcast(tensor, root, name=name, set_id=registered_id(process_set), inplace=False)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root, process_set = ctx.arguments
        (averaged,) = _reduce(list(gradients), _AVERAGE, process_set, False)
        return (
            (averaged if state.engine().launch.rank == root else torch.zeros_like(averaged)),
            None,
            None,
            None,
        )


class Alltoall(Function):
    """The gradient takes the way back: what was received from a rank is sent to it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        engine = state.engine()
        handle = engine.alltoall(tensor, splits, name=name, set_id=registered_id(process_set))
        result, received = engine.synchronize(handle)
        ctx.received, ctx.process_set = received, process_set
        if splits is None:
            return result
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        engine = state.engine()
        handle = engine.alltoall(
            gradients[0].contiguous(), ctx.received, name=None, set_id=registered_id(ctx.process_set)
        )
        return engine.synchronize(handle)[0], None, None, None


class Reducescatter(Function):
    """One tensor, or several as one operation; backwards every rank's part is gathered again."""

    @staticmethod
    def forward(
        ctx: Any,
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.arguments = (reduction, process_set, grouped)
        engine = state.engine()
        return engine.synchronize(
            engine.reducescatter(
                tensors, reduction, name=name, set_id=registered_id(process_set), grouped=grouped
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduction, process_set, grouped = ctx.arguments
        _check_differentiable("reducescatter", reduction)
        factor = reduction.prescale * reduction.postscale
        if reduction.op is ReduceOp.SUM:
            factor *= process_set.size() or 1
        return (
            None,
            None,
            None,
            None,
            *_gather(
                [(gradient * factor).contiguous() for gradient in gradients], None, process_set, grouped
            ),
        )
