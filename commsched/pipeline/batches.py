"""The batches of the steps in flight: their rows, and what the first and the last stage take of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.full_state import on_device
from commsched.pipeline.rows import Range, cut
from commsched.pipeline.stage import Stage
from scheduler.ir.layout import Layout

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples, lists and dicts of them; rows are their first dimension."""


class Batches:
    """``given[p]``: inputs and targets of period p. ``arguments`` makes the forward's arguments of inputs."""

    def __init__(self, layout: Layout, stages: dict[int, Stage], arguments: Arguments) -> None:
        self.layout, self.stages, self._arguments = layout, stages, arguments
        self.given: dict[int, Batch] = {}

    def add(self, period: int, batch: Any, copy: bool = False) -> None:
        """Keeps what this rank reads of a batch. ``copy``: keeps copies of its tensors."""
        inputs = targets = None
        if 0 in self.stages:
            inputs = tree_map(_clone, batch[0]) if copy else batch[0]
        if self.layout.stages - 1 in self.stages:
            targets = tree_map(_clone, batch[1]) if copy else batch[1]
        self.given[period] = inputs, targets

    @contextmanager
    def kept(self, period: int, batch: Any) -> Iterator[None]:
        """Keeps a batch within ``with``."""
        self.add(period, batch)
        try:
            yield
        finally:
            del self.given[period]

    def inputs(self, period: int, rows: Range) -> Any:
        """The first stage's arguments for these rows."""
        return on_device(self._arguments(cut(self.given[period][0], rows)), self.stages[0].device)

    def targets(self, period: int, rows: Range) -> Any:
        """The targets of these rows."""
        return on_device(cut(self.given[period][1], rows), self.stages[self.layout.stages - 1].device)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
