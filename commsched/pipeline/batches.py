"""The batches of the steps in flight: their rows, and what the first and the last stage take of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from commsched.pipeline.chain import Arguments
from commsched.pipeline.full_state import on_device
from commsched.pipeline.rows import Range, Share, cut, rows_of, shape_key
from commsched.pipeline.stage import Stage
from scheduler.ir.layout import Layout

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples, lists and dicts of them; rows are their first dimension."""


class Batches:
    """``given[p]``: inputs and targets of period p. ``arguments`` makes the forward's arguments of inputs."""

    def __init__(self, layout: Layout, stages: dict[int, Stage], arguments: Arguments) -> None:
        self.layout, self.stages, self._arguments = layout, stages, arguments
        self.given: dict[int, Batch] = {}
        self._checked: Share | None = None

    def share(self, batch: Batch, local: bool) -> Share:
        """The rows of a batch; ``ValueError`` where a replica would get none."""
        rows = rows_of(batch, "the batch")
        replicas = [self.layout.replicas(stage) for stage in range(self.layout.stages)]
        share = Share(rows, self.layout.microbatches, shape_key(batch), replicas[0] if local else 0)
        if share != self._checked:
            for count in replicas:
                share.check(count)
            self._checked = share
        return share

    def add(self, period: int, batch: Batch, copy: bool = False) -> None:
        """Keeps a batch. ``copy``: keeps copies of the tensors that this rank needs."""
        if copy:
            first, last = 0 in self.stages, self.layout.stages - 1 in self.stages
            inputs, targets = batch
            batch = (tree_map(_clone, inputs) if first else None, tree_map(_clone, targets) if last else None)
        self.given[period] = batch

    def inputs(self, period: int, rows: Range) -> Any:
        """The first stage's arguments for these rows."""
        return on_device(self._arguments(cut(self.given[period][0], rows)), self.stages[0].device)

    def targets(self, period: int, rows: Range) -> Any:
        """The targets of these rows."""
        return on_device(cut(self.given[period][1], rows), self.stages[self.layout.stages - 1].device)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
