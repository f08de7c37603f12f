"""The rows of the steps in flight: of batches that every rank has, or of local ones, which are announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from math import inf, nan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Sampler

from commsched.channels import Pending
from commsched.pipeline.messages import Fabric, Lane
from commsched.pipeline.random_state import set_random_state
from commsched.pipeline.rows import Share, constants_key, has_row_lists, held, rows_of, shape_key, size_of
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
        """The rows of a batch that every rank has, or of this rank's part of one; ``ValueError`` where a
        replica would get none.
        """
        if local:
            self._local(period, batch)
        else:
            rows, inputs = rows_of(batch, "the batch"), batch[0]
            constants = self._constants(inputs, rows)
            share = Share(rows, self.layout.microbatches, shape_key(batch), None, constants)
            self._take(period, share)

    def _constants(self, inputs: Any, rows: int) -> int:
        replicas = {self.layout.replicas(stage) for stage in range(self.layout.stages)}
        if len(replicas) > 1 and has_row_lists(inputs, rows):
            raise ValueError(
                f"the inputs have a list with an entry for each of {rows} rows, and stages with different"
                f" numbers of replicas ({sorted(replicas)}) exchange rows of tensors only: pass a tensor"
            )
        return constants_key(inputs)

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
        key, constants, passed = 0, 0, None
        if stage is not None:
            inputs, targets = batch
            ends = [inputs if stage == 0 else targets]
            if stage == 0 and self.rank in self.layout.ranks[-1]:
                ends.append(targets)
            passed = rows_of(ends, f"the batch of rank {self.rank}")
            key, constants = crc32(repr(shape_key(ends[0])).encode()), self._constants(ends[0], passed)
        self._passed[period] = passed
        self._announced.announce(period, torch.tensor([passed or 0, key, constants]))

    def __missing__(self, period: int) -> Share:
        passed, counts = self._passed.pop(period), self._announced.read(period)
        each = [int(count[0]) for count in counts]
        key = ("local", *(int(count[1]) for count in counts))
        constants = tuple(int(count[2]) for count in counts)
        stage = end_stage(self.layout, self.rank)
        mine = None if stage is None else held(sum(each), self.layout, stage, self.rank)
        if mine is not None and passed != size_of(mine):
            raise ValueError(
                f"rank {self.rank} passed {passed} rows to a local step of stage {stage}; the first stage's"
                f" ranks passed {each}, together {sum(each)}, and of {sum(each)} rows in"
                f" {self.layout.microbatches} micro-batches this rank must pass {size_of(mine)}: take"
                f" pipeline.rows(n) of a step's n rows, or a loader with pipeline.sampler(...)"
            )
        return self._take(
            period, Share(sum(each), self.layout.microbatches, key, mine, any(constants) and constants)
        )

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


# -- the number of terms of a step's mean loss ---------------------------------------------------------------

# The loss may be a sum over tokens or pixels, of which ranks have different numbers.

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

    def take(self, period: int, counted: float | None, local: bool) -> None:
        """A batch's terms, or those of this rank's part of it. ``ValueError`` for a batch without."""
        if not local:
            assert counted is not None
            self[period] = _checked(counted, period)
        elif counted is not None:
            self._announced.announce(period, torch.tensor([counted], dtype=torch.float64))

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

    def counted(self, targets: Any, local: bool) -> float | None:
        """The terms of some targets, before anybody is told; None on ranks that have none."""
        if local and self._rank not in self._readers:
            return None
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


# -- a batch sampler for ``DataLoader`` that yields just the rows that this rank passes to a local step ------


class StepSampler(Sampler[list[int]]):
    """Yields, for each step, the indices of this rank's rows; one index on ranks that read no batch.

    ``rows(n)``: this rank's rows of a step of ``n`` rows; ``local``: these are not all of them. The position
    counts the steps that the pipeline has taken, not the batches that a loader has fetched ahead: new
    iterators begin there, and checkpoints hold it. After an epoch's last step the next epoch begins, in
    another order if ``shuffle``.
    """

    def __init__(
        self,
        rows: Callable[[int], list[int]],
        dataset: Sized,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        local: bool,
    ) -> None:
        self._rows, self._size, self._batch_size, self.local = rows, len(dataset), batch_size, local
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._data = {"rows": self._size, "batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        self._data |= {"drop_last": drop_last, "local": local}
        self.epoch, self.position = 0, 0
        self._random: list[Tensor] | None = None
        if batch_size < 1 or not len(self):
            raise ValueError(
                f"batch_size must be at least 1, and with drop_last=True at most the data set's {self._size}"
                f" rows; got {batch_size} and {self._size} rows"
            )
        self._rows(min(batch_size, self._size))
        self._rows(self._step_size(len(self) - 1))

    def _step_size(self, number: int) -> int:
        return min(self._batch_size, self._size - number * self._batch_size)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return (self._size if self._drop_last else self._size + self._batch_size - 1) // self._batch_size

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch's steps."""
        return min(self._size, len(self) * self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if self._random is not None:
            # A loader draws a seed for its workers; in mid-epoch the run that was stopped did not.
            set_random_state(self._random, torch.device("cpu"))
            self._random = None
        order = torch.arange(self._size)
        if self._shuffle:
            order = torch.randperm(
                self._size, generator=torch.Generator().manual_seed(self._seed + self.epoch)
            )
        for number in range(self.position, len(self)):
            step = order[number * self._batch_size :][: self._step_size(number)]
            yield step[self._rows(len(step)) or [0]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; within this epoch, stays where the pipeline is."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self) -> None:
        """The pipeline has taken a step."""
        self.position += 1
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Data and position, for a checkpoint."""
        return {"data": self._data, "epoch": self.epoch, "position": self.position}

    def resume(self, state: dict[str, Any], random: list[Tensor] | None) -> None:
        """Goes on at a checkpoint's position, whose random numbers were ``random``. None: not kept."""
        if state["data"] != self._data:
            raise ValueError(
                f"the checkpoint's sampler has {state['data']}, this one {self._data}; make it of the same"
                " data with the same arguments"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._random = random if self.position else None


class Sampling:
    """A pipeline's sampler, if it has one, and a checkpoint's position that waits for one."""

    def __init__(self) -> None:
        self._sampler: StepSampler | None = None
        self._waiting: tuple[dict[str, Any], list[Tensor] | None] | None = None

    def use(self, sampler: StepSampler) -> StepSampler:
        """Takes it in the place of any earlier one."""
        self._sampler = sampler
        if self._waiting is not None:
            sampler.resume(*self._waiting)
            self._waiting = None
        return sampler

    def check_other(self, sampler: StepSampler, replaces: bool | None) -> None:
        """``ValueError`` if steps advance a sampler of other data, which this one is not said to replace."""
        before = None if self._sampler is None else self._sampler.state()["data"]
        if not replaces and before is not None and before != (data := sampler.state()["data"]):
            raise ValueError(
                f"the pipeline's steps advance a sampler of {before} already, and this one is of {data}; pass"
                " trains=False for one that evaluates, or trains=True for one that takes the other's place"
            )

    def check(self, local: bool) -> None:
        """``ValueError`` where a step is not the kind of step that the sampler yields."""
        if self._sampler is not None and local is not self._sampler.local:
            raise ValueError(
                f"this pipeline's sampler was made with local={self._sampler.local}, so call"
                f" step(batch, local={self._sampler.local}); got local={local}"
            )

    def advance(self) -> None:
        if self._sampler is not None:
            self._sampler.advance()

    def state(self) -> dict[str, Any] | None:
        return None if self._sampler is None else self._sampler.state()

    def resume(self, state: dict[str, Any] | None, random: list[Tensor] | None) -> None:
        self._waiting = None if state is None else (state, random)
        if self._sampler is not None:
            self.use(self._sampler)
