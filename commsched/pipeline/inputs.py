"""The inputs of the first stage, and the targets of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsched.pipeline.exchange import Exchange
from commsched.pipeline.rows import Range
from commsched.pipeline.stage import Head, Micro, Stage, flattened
from scheduler.ir.layout import Layout

Feed = Callable[[int, Range], Any]
"""Period and rows -> the arguments of the first stage, or the targets of the last."""


class Inputs:
    """``tells``: whether this rank adds to the value of the loss; tiles of one replica all have the same, so
    only the first does.
    """

    def __init__(
        self, layout: Layout, rank: int, stages: dict[int, Stage], arguments: Feed, targets: Feed
    ) -> None:
        self.layout, self.rank, self.stages = layout, rank, stages
        self._arguments, self._targets = arguments, targets
        self._spec: Any = None
        self.tells = rank in tellers(layout)

    def arguments(self, exchange: Exchange, number: int, micro: Micro) -> tuple[list[Any], Any, list[Any]]:
        """The leaves that a stage takes, their structure, and how tiles cut them."""
        if number:
            return exchange.arguments(number, micro)
        leaves, self._spec = flattened(self._arguments(micro[1], exchange.given(0, micro)), self._spec)
        tiled = self.stages[0].tiled.get(micro[0])
        if tiled is None:
            return leaves, self._spec, [None] * len(leaves)
        leaves, cuts = tiled.scatter(leaves)
        return leaves, self._spec, cuts

    def head(self, exchange: Exchange, number: int, micro: Micro) -> Head | None:
        if number + 1 < self.layout.stages:
            return None
        low, high = exchange.rows(number, self.rank, micro)
        targets = self._targets(micro[1], exchange.given(number, micro))
        first = exchange.place(number, self.rank, micro[0])[1] == 0
        return Head(targets, (high - low) / exchange.shares[micro[1]].rows, first)


def tellers(layout: Layout) -> list[int]:
    """The ranks that tell the loss: of each range of rows of the last stage, the first tile."""
    last = layout.stages - 1
    found = [ranks[:: layout.tile_count(last)] for ranks in (layout.ranks[last], *layout.mirror[last:])]
    return list(dict.fromkeys(rank for ranks in found for rank in ranks))
