"""Orders for replicas whose stages are held by groups of ranks, which may share ranks in any way.

Two stages in mirrored order on two ranks (GEMS), two micro-batches of each replica; stages 2 and 3 are the
second replica's. While one replica is at its far end, the other fills the rank:

    time     0    1    2    3    4    5    6    7    8    9    10   11
    rank 0   0F0  3F0  3B0  .    0B0  .    0F1  3F1  3B1  .    0B1  .
    rank 1   2F0  1F0  1B0  .    2B0  .    2F1  1F1  1B1  .    2B1  .

One sequence is made for all ranks, and each does its own part of it in that order: whatever waits for
something stands behind it, on every rank, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.ir.actions import Action, Kind

Holders = Sequence[Sequence[Sequence[int]]]
"""By replica and stage: the ranks that hold it."""

_TIME = {Kind.F: 1.0, Kind.B: 2.0}


def interleaved_replicas(holders: Holders, microbatches: int) -> tuple[Action, ...]:
    """Forwards and backwards of all replicas in the order in which they can start. Stage s of replica r is
    number ``r * stages + s``.

    A stage runs as many micro-batches ahead of its backwards as there are stages from it on, as in 1F1B.
    """
    if microbatches < 1 or not holders or len({len(replica) for replica in holders}) != 1 or not holders[0]:
        raise ValueError(
            f"orders need at least 1 micro-batch and replicas of equally many stages, got {microbatches} and"
            f" replicas of {[len(replica) for replica in holders]} stages"
        )
    return tuple(_Clock(holders, microbatches).actions())


def share_of(rank: int, holders: Holders, order: Sequence[Action]) -> tuple[Action, ...]:
    """What one rank does."""
    stages = len(holders[0])
    return tuple(a for a in order if rank in holders[a.stage // stages][a.stage % stages])  # type: ignore[operator]


class _Clock:
    """Starts one action after the other, each as soon as its ranks and what it waits for allow."""

    def __init__(self, holders: Holders, microbatches: int) -> None:
        self.holders, self.microbatches = holders, microbatches
        self.stages = len(holders[0])
        self.free = {rank: 0.0 for replica in holders for ranks in replica for rank in ranks}
        self.done: dict[tuple[Kind, int, int], list[float]] = {
            (kind, r, s): []
            for kind in (Kind.F, Kind.B)
            for r in range(len(holders))
            for s in range(self.stages)
        }

    def actions(self) -> Iterator[Action]:
        for _ in range(len(self.done) * self.microbatches):
            # Backwards first, then the oldest micro-batch: what frees memory.
            start, _, microbatch, replica, stage, kind = min(self._candidates())
            end = start + _TIME[Kind(kind)]
            self.done[Kind(kind), replica, stage].append(end)
            for rank in self.holders[replica][stage]:
                self.free[rank] = end
            yield Action(Kind(kind), microbatch, replica * self.stages + stage)

    def _candidates(self) -> Iterator[tuple[float, bool, int, int, int, str]]:
        for (kind, replica, stage), ends in self.done.items():
            if len(ends) == self.microbatches:
                continue
            ready = self._ready(kind, replica, stage, len(ends))
            if ready is not None:
                start = max(ready, *(self.free[rank] for rank in self.holders[replica][stage]))
                yield start, kind is Kind.F, len(ends), replica, stage, kind.value

    def _ready(self, kind: Kind, replica: int, stage: int, microbatch: int) -> float | None:
        """When what this waits for has ended; None while that is not known."""
        waits: list[tuple[Kind, int]] = []
        if kind is Kind.F:
            waits += [(Kind.F, stage - 1)] if stage else []
            under_way = microbatch - len(self.done[Kind.B, replica, stage])
            if under_way >= self.stages - stage:
                return None
        else:
            waits += [(Kind.F, stage)]
            waits += [(Kind.B, stage + 1)] if stage + 1 < self.stages else []
        ends = [self.done[kind, replica, other] for kind, other in waits]
        if any(len(times) <= microbatch for times in ends):
            return None
        return max((times[microbatch] for times in ends), default=0.0)
