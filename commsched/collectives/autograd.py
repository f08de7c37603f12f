"""Gradients of the collectives, the same with every carrier.

Horovod's convention: a script's loss is the average over the ranks. So if all ranks got one rank's values
(allgather, broadcast), the backward averages their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.current_carrier import carrier
from commsched.collectives.handles import start, synchronize
from commsched.collectives.process_sets import ProcessSet

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM)


def _run(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    reduction: Reduction | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a collective and return one result per tensor."""
    handle = start(kind, tensors if grouped else tensors[0], name, process_set, reduction=reduction)
    return tuple(synchronize(handle)) if grouped else (synchronize(handle),)


def _reduced(
    gradients: Sequence[torch.Tensor],
    process_set: ProcessSet,
    grouped: bool,
    reduction: Reduction = Reduction(ReduceOp.AVERAGE),  # noqa: B008 - immutable
) -> tuple[torch.Tensor, ...]:
    contiguous = [gradient.contiguous() for gradient in gradients]
    return _run("allreduce", contiguous, None, process_set, grouped, reduction)


class Reduce(Function):
    """An ``allreduce`` or ``reducescatter`` (``kind``) of one tensor, or of several as one operation.

    The backward of an allreduce reduces the gradients in the same way, that of a reducescatter gathers every
    rank's part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (kind, process_set, grouped, reduction)
        return _run(kind, tensors, name, process_set, grouped, reduction)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        kind, process_set, grouped, reduction = ctx.arguments
        if reduction.op not in _LINEAR:
            raise NotImplementedError(
                f"{kind} with op={reduction.op.name.title()} has no gradient here; use Average or Sum, or "
                "pass tensor.detach()"
            )
        if kind == "allreduce":
            found = _reduced(gradients, process_set, grouped, reduction)
        else:
            factor = reduction.prescale * reduction.postscale
            if reduction.op is ReduceOp.SUM:
                factor *= process_set.size() or 1
            scaled = [(gradient * factor).contiguous() for gradient in gradients]
            found = _run("allgather", scaled, None, process_set, grouped)
        return (None, None, None, None, None, *found)


class Allgather(Function):
    """One tensor, or several as one operation; the backward averages each rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (process_set, grouped)
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return _run("allgather", tensors, name, process_set, grouped)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        process_set, grouped = ctx.arguments
        averaged = _reduced(gradients, process_set, grouped)
        rows = torch.tensor([ctx.rows], dtype=torch.int64, device="cpu")
        (all_rows,) = _run("allgather", [rows], None, process_set, grouped=False)
        before = all_rows[: process_set.rank()].sum(dim=0).tolist()
        mine = (
            gradient.narrow(0, start, rows)
            for gradient, start, rows in zip(averaged, before, ctx.rows, strict=True)
        )
        return (None, None, None, *mine)


class Broadcast(Function):
    """The backward gives the averaged gradient to the root, zeros to the other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.arguments = (root, process_set)
        return synchronize(start("broadcast", tensor, name, process_set, root=root))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        root, process_set = ctx.arguments
        (averaged,) = _reduced(gradients, process_set, grouped=False)
        mine = averaged if carrier().launch.rank == root else torch.zeros_like(averaged)
        return mine, None, None, None


class Alltoall(Function):
    """The backward sends each row's gradient back to the rank that the row came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        result, received = synchronize(start("alltoall", tensor, name, process_set, splits=splits))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        handle = start("alltoall", gradients[0].contiguous(), None, ctx.process_set, splits=ctx.received)
        return synchronize(handle)[0], None, None, None
