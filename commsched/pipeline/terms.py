"""Over how many terms the mean loss of a step is taken, where the loss is a sum over tokens or pixels."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from commsched.pipeline.fabric import Fabric
from commsched.pipeline.shares import Announcements
from scheduler.ir.layout import Layout

Count = Callable[[Any], Any]
"""Targets -> the number of terms that the loss adds up for them."""


class Terms(dict[int, float]):
    """``terms[period]``: the terms of a step on all replicas, by which its loss is divided.

    Every rank counts the terms of a whole batch. Of a local batch, a replica of the last stage has its own
    targets only. Its first tile sends its count to the other ranks of the stage when the step is given. They
    wait for it where the last stage first reads the period, and add up the counts in the order of ranks.
    """

    def __init__(self, count: Count, layout: Layout, fabric: Fabric) -> None:
        self._count, self._rank, last = count, fabric.rank, layout.stages - 1
        self._readers = layout.ranks[last]
        tellers = self._readers[:: layout.tile_count(last)]
        self._announced = Announcements(fabric.lane("terms"), fabric.rank, tellers, self._readers)

    def take(self, period: int, targets: Any, local: bool) -> None:
        """Counts a batch's terms, or those of this rank's part of it. ``ValueError`` for a batch without."""
        if not local:
            self[period] = _checked(self._counted(targets), period)
            return
        if self._rank in self._readers:
            self._announced.announce(period, torch.tensor([self._counted(targets)], dtype=torch.float64))

    def __missing__(self, period: int) -> float:
        self[period] = _checked(float(sum(self._announced.read(period))), period)
        return self[period]

    def forget(self, period: int) -> None:
        """The period is over. A replica without rows in an evaluation has not read its counts."""
        self._announced.read(period)
        self.pop(period, None)

    def settle(self) -> None:
        """Waits for all counts."""
        for period in self._announced.unread:
            self[period]
        self._announced.settle()

    def _counted(self, targets: Any) -> float:
        count = self._count(targets)
        try:
            terms = float(count)
        except (TypeError, ValueError, RuntimeError):
            terms = nan
        if not 0 <= terms < inf:
            got = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else repr(count)
            raise ValueError(
                "count(targets) must return one number that is not negative, how many terms the loss adds up"
                f" for these targets; got {got}"
            )
        return terms


def _checked(terms: float, period: int) -> float:
    if not terms:
        what = f"step {period}" if period >= 0 else "this evaluation"
        raise ValueError(
            f"count(targets) is 0 for all targets of {what}, so its loss is no mean: leave out batches"
            " without a term"
        )
    return terms
