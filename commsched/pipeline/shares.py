"""The rows of the steps in flight: of batches that every rank has, or of local ones, which are announced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from commsched.pipeline.fabric import Fabric, Lane
from commsched.pipeline.rows import Share, held, rows_of, shape_key, size_of
from commsched.transport.channel import Pending
from scheduler.ir.layout import Layout


class Announcements:
    """Numbers of the steps given, from the ranks ``tellers`` to ``readers``, who wait for them later."""

    def __init__(self, lane: Lane, rank: int, tellers: Sequence[int], readers: Sequence[int]) -> None:
        self._lane, self._rank, self._tellers = lane, rank, tellers
        self._peers = [reader for reader in readers if reader != rank]
        self._coming: dict[int, list[tuple[Tensor, Pending | None]]] = {}
        self._sent: list[Pending] = []

    def announce(self, period: int, mine: Tensor) -> None:
        """Every reader calls. ``mine``: this rank's numbers, of which others see nothing unless it tells."""
        coming: list[tuple[Tensor, Pending | None]] = []
        for teller in self._tellers:
            value = mine if teller == self._rank else torch.empty_like(mine)
            coming.append((value, None if value is mine else self._lane.receive(teller, [value])))
        self._coming[period] = coming
        if self._rank in self._tellers:
            self.settle()
            self._sent = [self._lane.send(peer, [mine]) for peer in self._peers]

    @property
    def unread(self) -> list[int]:
        """The periods whose numbers nobody has read."""
        return list(self._coming)

    def read(self, period: int) -> list[Tensor]:
        """The tellers' numbers, once; none of a period that was not announced or has been read."""
        coming = self._coming.pop(period, [])
        for _, pending in coming:
            if pending is not None:
                pending.wait()
        return [value for value, _ in coming]

    def settle(self) -> None:
        """Waits for what this rank has sent."""
        for pending in self._sent:
            pending.wait()
        self._sent = []


class Shares(dict[int, Share]):
    """``shares[period]``.

    Of local batches no rank sees all rows. The ranks of the first stage announce how many rows each of them
    has. The sum is the step's, and it is waited for where a period's share is first read: later stages of an
    asynchronous pipeline read it several steps after the first stage has begun the period.
    """

    def __init__(self, layout: Layout, fabric: Fabric, name: str) -> None:
        self.layout, self.rank = layout, fabric.rank
        tellers = layout.ranks[0][:: layout.tile_count(0)]
        lane = fabric.lane(f"rows of {name}")
        self._announced = Announcements(lane, fabric.rank, tellers, range(fabric.size))
        self._passed: dict[int, int | None] = {}  # rows of local steps; None: this rank holds no end
        self._checked: Share | None = None

    def take(self, period: int, batch: Any, local: bool) -> None:
        """The rows of a batch that every rank has, or of this rank's part of one."""
        if local:
            self._local(period, batch)
        else:
            self._whole(period, batch)

    # Batches that every rank has

    def _whole(self, period: int, batch: Any) -> None:
        """Takes the rows of a batch; ``ValueError`` where a replica would get none."""
        self._take(period, Share(rows_of(batch, "the batch"), self.layout.microbatches, shape_key(batch)))

    def _take(self, period: int, share: Share) -> Share:
        # An evaluation (period -1) leaves out micro-batches without rows.
        if share != self._checked and period >= 0:
            share.check(most_replicas(self.layout))
            self._checked = share
        self[period] = share
        return share

    # Local batches

    def _local(self, period: int, batch: Any) -> None:
        """Announces the rows of this rank's part of a step."""
        stage = end_stage(self.layout, self.rank)
        key, passed = 0, None
        if stage is not None:
            inputs, targets = batch
            ends = [inputs if stage == 0 else targets]
            if stage == 0 and self.rank in self.layout.ranks[-1]:
                ends.append(targets)
            passed = rows_of(ends, f"the batch of rank {self.rank}")
            key = crc32(repr(shape_key(ends[0])).encode())
        self._passed[period] = passed
        self._announced.announce(period, torch.tensor([passed or 0, key]))

    def __missing__(self, period: int) -> Share:
        passed, counts = self._passed.pop(period), self._announced.read(period)
        each = [int(count[0]) for count in counts]
        key = ("local", *(int(count[1]) for count in counts))
        stage = end_stage(self.layout, self.rank)
        mine = None if stage is None else held(sum(each), self.layout, stage, self.rank)
        if mine is not None and passed != size_of(mine):
            raise ValueError(
                f"rank {self.rank} passed {passed} rows to a local step of stage {stage}; the first stage's"
                f" ranks passed {each}, together {sum(each)}, and of {sum(each)} rows in"
                f" {self.layout.microbatches} micro-batches this rank must pass {size_of(mine)}: take"
                f" pipeline.rows(n) of a step's n rows, or a loader with pipeline.sampler(...)"
            )
        return self._take(period, Share(sum(each), self.layout.microbatches, key, mine))

    # All of them

    def settle(self) -> None:
        """Waits for all announcements."""
        for period in self._announced.unread:
            self[period]
        self._announced.settle()


def most_replicas(layout: Layout) -> int:
    return max(layout.replicas(stage) for stage in range(layout.stages))


def rows_to_pass(layout: Layout, rank: int, rows: int) -> list[int]:
    """The rows of a step of ``rows`` rows that a rank passes to a local step; none in between the ends."""
    Share(rows, layout.microbatches, None).check(most_replicas(layout))
    stage = end_stage(layout, rank)
    parts = () if stage is None else held(rows, layout, stage, rank)
    return [row for low, high in parts for row in range(low, high)]


def end_stage(layout: Layout, rank: int) -> int | None:
    """The stage whose rows a rank passes to a local step: the first, else the last, else None."""
    if layout.mirror:
        raise ValueError(
            "mirrored replicas take the inputs of some rows and the targets of others on the same rank, so"
            " a step cannot be local; pass the whole batch on every rank"
        )
    last = layout.stages - 1
    first_too = layout.ranks[0] == layout.ranks[last]
    if first_too and layout.replicas(0) != layout.replicas(last):
        raise ValueError(
            f"the first and the last stage are on the same ranks and divide rows differently (into"
            f" {layout.replicas(0)} and {layout.replicas(last)} parts), so a step cannot be local; pass the"
            " whole batch on every rank"
        )
    if rank in layout.ranks[0]:
        return 0
    return last if rank in layout.ranks[last] else None
