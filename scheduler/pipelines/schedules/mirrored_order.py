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

from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.program import COMPUTE_LANE
from scheduler.simulate.simulator import run
from scheduler.simulate.task_graph import OTHER, GraphBuilder, Task, TaskGraph

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
    graph = _competition(holders, microbatches)
    result = run(graph, 1)
    numbers = range(len(graph.tasks))
    order = sorted(numbers, key=lambda task: (result.start[0, task], graph.urgency[task]))
    return tuple(graph.tasks[task].action for task in order)


def share_of(rank: int, holders: Holders, order: Sequence[Action]) -> tuple[Action, ...]:
    """What one rank does."""
    stages = len(holders[0])
    return tuple(a for a in order if rank in holders[a.stage // stages][a.stage % stages])  # type: ignore[operator]


def _competition(holders: Holders, microbatches: int) -> TaskGraph:
    """Forwards and backwards of all replicas, competing for their ranks: backwards first, then the oldest
    micro-batch, which frees memory.
    """
    stages, graph = len(holders[0]), GraphBuilder()
    everything = [
        (kind is Kind.F, index, replica, stage, kind)
        for kind in (Kind.F, Kind.B)
        for index in range(microbatches)
        for replica in range(len(holders))
        for stage in range(stages)
    ]
    tasks: dict[tuple[Kind, int, int, int], int] = {}
    for urgency, (_, index, replica, stage, kind) in enumerate(sorted(everything)):
        task = Task(Action(kind, index, replica * stages + stage), COMPUTE_LANE, 0)
        ranks = tuple(holders[replica][stage])
        tasks[kind, replica, stage, index] = graph.task(task, _TIME[kind], OTHER, ranks, urgency)
    for (kind, replica, stage, index), number in tasks.items():
        ahead = index - (stages - stage)
        before = {
            Kind.F: [(Kind.F, stage - 1, index), (Kind.F, stage, index - 1), (Kind.B, stage, ahead)],
            Kind.B: [(Kind.F, stage, index), (Kind.B, stage + 1, index), (Kind.B, stage, index - 1)],
        }[kind]
        for other, place, batch in before:
            if (other, replica, place, batch) in tasks:
                graph.edge(tasks[other, replica, place, batch], number)
    return graph.build()
