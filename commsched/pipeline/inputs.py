"""The batches of the steps in flight: what the first and the last stage take of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.exchange import Exchange
from commsched.pipeline.full_state import on_device
from commsched.pipeline.rows import cut
from commsched.pipeline.stage import Head, Loss, Micro, Stage, flattened
from commsched.pipeline.terms import Terms
from scheduler.ir.layout import Layout

Batch = tuple[Any, Any]
"""Inputs and targets: tensors, or tuples, lists and dicts of them; rows are their first dimension."""


class Inputs:
    """``given[p]``: inputs and targets of period p. ``arguments`` makes the forward's arguments of inputs.
    ``tells``: whether this rank adds to the value of the loss; tiles of one replica all have the same, so
    only the first does. ``terms``: by which a step's loss is divided; None: losses are means over rows.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        stages: dict[int, Stage],
        arguments: Arguments,
        terms: Terms | None = None,
    ) -> None:
        self.layout, self.rank, self.stages, self.terms = layout, rank, stages, terms
        self.given: dict[int, Batch] = {}
        self._arguments = arguments
        self._spec: Any = None
        self.tells = rank in tellers(layout)

    def add(self, period: int, batch: Any, copy: bool = False) -> None:
        """Keeps what this rank reads of a batch. ``copy``: keeps copies of its tensors."""
        inputs = targets = None
        if 0 in self.stages:
            inputs = tree_map(_clone, batch[0]) if copy else batch[0]
        if self.layout.stages - 1 in self.stages:
            targets = tree_map(_clone, batch[1]) if copy else batch[1]
        self.given[period] = inputs, targets

    def count_terms(self, period: int, batch: Any, local: bool) -> None:
        """Counts the terms of a batch whose loss is wanted."""
        if self.terms is not None:
            self.terms.take(period, batch[1], local)

    def forget(self, period: int) -> None:
        """The period is over."""
        self.given.pop(period, None)
        if self.terms is not None:
            self.terms.forget(period)

    @contextmanager
    def kept(self, period: int, batch: Any) -> Iterator[None]:
        """Keeps a batch within ``with``."""
        self.add(period, batch)
        try:
            yield
        finally:
            self.forget(period)

    def arguments(self, exchange: Exchange, number: int, micro: Micro) -> tuple[list[Any], Any, list[Any]]:
        """The leaves that a stage takes, their structure, and how tiles cut them."""
        if number:
            return exchange.arguments(number, micro)
        stage, rows = self.stages[0], exchange.given(0, micro)
        arguments = on_device(self._arguments(cut(self.given[micro[1]][0], rows)), stage.device)
        leaves, self._spec = flattened(arguments, self._spec)
        tiled = stage.tiled.get(micro[0])
        if tiled is None:
            return leaves, self._spec, [None] * len(leaves)
        leaves, cuts = tiled.scatter(leaves)
        return leaves, self._spec, cuts

    def head(self, exchange: Exchange, number: int, micro: Micro, count: Loss | None = None) -> Head | None:
        """What the last stage does with its outputs. ``count``: to call instead of the loss."""
        if number + 1 < self.layout.stages:
            return None
        mine = cut(self.given[micro[1]][1], exchange.given(number, micro))
        first = exchange.place(number, self.rank, micro[0])[1] == 0
        weight = 0.0 if count is not None else self._weight(exchange, number, micro)
        return Head(on_device(mine, self.stages[number].device), weight, first, count)

    def _weight(self, exchange: Exchange, number: int, micro: Micro) -> float:
        """The factor that makes this rank's loss of a micro-batch its part of the step's mean."""
        if self.terms is not None:
            return 1 / self.terms[micro[1]]
        low, high = exchange.rows(number, self.rank, micro)
        return (high - low) / exchange.shares[micro[1]].rows


def checked_pair(batch: Any) -> Any:
    """The batch, if it is inputs and targets; None stands for what nobody reads here."""
    if batch is None:
        return None, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise ValueError(
        f"a batch is a pair (inputs, targets), and this one is {what}; several inputs are a tuple or a dict"
        " in it: ((x, mask), y)"
    )


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def tellers(layout: Layout) -> list[int]:
    """The ranks that tell the loss: of each range of rows of the last stage, the first tile."""
    last = layout.stages - 1
    found = [ranks[:: layout.tile_count(last)] for ranks in (layout.ranks[last], *layout.mirror[last:])]
    return list(dict.fromkeys(rank for ranks in found for rank in ranks))
