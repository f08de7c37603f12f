"""Clipping by the norm over all stages, and steps that all stages skip."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from commsched.optimizer.sharded_step import total_norm
from commsched.pipeline.fabric import Fabric, to_host
from commsched.pipeline.reduction import summed_over
from commsched.pipeline.update import Update


class Clipping:
    """Called before the steps of a period, when all gradients are there. Every rank computes the same norm
    from one number of each rank.
    """

    def __init__(
        self,
        fabric: Fabric,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
    ) -> None:
        self.rank, self.size, self.lane = fabric.rank, fabric.size, fabric.lane("norms")
        self.max_norm, self.norm_type, self.skip_nonfinite = max_norm, norm_type, skip_nonfinite

    def __call__(self, updates: Collection[Update]) -> bool:
        """Clips the gradients of this rank's stages; whether the step is to be skipped."""
        counted = [grad for update in updates for grad in update.counted_grads()]
        finite = True
        if self.max_norm is not None:
            total = self.norm(counted, self.norm_type)
            scale([grad for update in updates for grad in update.all_grads()], self.max_norm, total)
            finite = bool(total.isfinite())
        if self.skip_nonfinite and (self.max_norm is None or not finite):
            # A norm may also overflow.
            finite = bool(self.norm(counted, torch.inf).isfinite())
        return self.skip_nonfinite and not finite

    def norm(self, grads: Iterable[Tensor], norm_type: float) -> Tensor:
        """The norm of all ranks' gradients, in double precision."""
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        if len({value.device for value in values}) > 1:
            values = [to_host(value) for value in values]
        return total_norm(
            [value for value in values if value.numel()], norm_type, self._everyones, torch.device("cpu")
        )

    def _everyones(self, mine: Tensor) -> Tensor:
        row = torch.zeros(self.size, dtype=torch.float64)
        row[self.rank] = mine
        summed_over(self.lane, self.rank, range(self.size), [row])
        return row


def scale(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiplies the gradients, each once, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0).item()
    if factor != 1.0:
        for grad in {id(grad): grad for grad in grads}.values():
            grad.mul_(factor)
