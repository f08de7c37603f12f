"""The mean loss of each step, told by ranks of the last stage to every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commsched.pipeline.fabric import Fabric
from commsched.pipeline.inputs import tellers
from commsched.pipeline.stage import Stage
from commsched.transport.channel import Pending
from scheduler.ir.layout import Layout


class Losses:
    """Sums the replicas' parts in their order, so that every rank has the same number.

    A period's parts travel within the iteration of its backward: sent when complete, received ahead.
    """

    def __init__(self, layout: Layout, fabric: Fabric, stages: dict[int, Stage]) -> None:
        self.ranks, self.fabric = tellers(layout), fabric
        self.stage = stages.get(layout.stages - 1)
        self.lane = fabric.lane("losses")
        self._coming: list[tuple[Tensor, Pending | None]] = []
        self._sent: list[Any] = []
        self._before: list[Any] = []  # of the iteration before

    def begin(self) -> None:
        """An iteration that a loss belongs to."""
        for pending in self._before:
            pending.wait()
        self._before, self._sent = self._sent, []
        for rank in self.ranks:
            value = torch.empty(1, dtype=torch.float64)
            mine = rank == self.fabric.rank
            self._coming.append((value, None if mine else self.lane.receive(rank, [value])))

    def tell(self, period: int) -> None:
        """This replica's part is complete."""
        assert self.stage is not None
        value = torch.tensor([self.stage.losses.pop(period, 0.0)], dtype=torch.float64)
        for mine, pending in self._coming:
            if pending is None:
                mine.copy_(value)
        for peer in range(self.fabric.size):
            if peer != self.fabric.rank:
                self._sent.append(self.lane.send(peer, [value]))

    def total(self) -> float:
        """At the end of the iteration."""
        found = 0.0
        for value, pending in self._coming:
            if pending is not None:
                pending.wait()
            found += float(value)
        self._coming = []
        return found

    def settle(self) -> None:
        for pending in (*self._before, *self._sent):
            pending.wait()
        self._before, self._sent = [], []
