"""The pass that makes one order for each rank of a pipeline with mirrored replicas (GEMS).

A rank with little to do in one direction has much to do in the other. Two stages on two ranks, two
micro-batches in each direction; 2 and 3 are those of the mirrored replica:

    time     0    1    2    3    4    5    6    7    8    9    10   11
    rank 0   0F0  1F2  1B2  .    0B0  .    0F1  1F3  1B3  .    0B1  .
    rank 1   0F2  1F0  1B0  .    0B2  .    0F3  1F1  1B1  .    0B3  .

Each direction keeps no more micro-batches than the schedule does. If both can run on a rank, backwards go
first, then the oldest micro-batch, which frees memory. One sequence is made for all ranks, and each does its
part of it in that order: whatever waits for something stands behind it, on every rank, so nothing waits for
ever. Steps come last, in one order on all ranks, because a stage's gradient is complete at different times on
its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.layout import Layout
from scheduler.ir.program import COMPUTE_LANE
from scheduler.pipelines.schedules.orders import Order
from scheduler.simulate.simulator import run
from scheduler.simulate.task_graph import OTHER, GraphBuilder, Task, TaskGraph

_TIME = {Kind.F: 1.0, Kind.B: 2.0, Kind.W: 1.0}
_URGENCY = {Kind.B: 0, Kind.F: 1, Kind.W: 2}


def in_both_directions(orders: Sequence[Order], layout: Layout) -> list[Order]:
    """Each rank's order; ``orders`` are those of the positions, for the micro-batches of one direction."""
    if any(action.shift or action.version for order in orders for action in order):
        raise ValueError(
            "mirrored replicas need a schedule in which every step ends before the next one begins, such as"
            " gpipe or 1f1b"
        )
    graph = _competition(orders, layout)
    start, urgency = run(graph, 1).start[0], graph.arrays.urgency
    numbers = sorted(range(len(graph.tasks)), key=lambda task: (start[task], urgency[task]))
    sequence = [graph.tasks[number].action for number in numbers]
    steps = [Action(Kind.STEP, stage=stage) for stage in reversed(range(layout.stages))]
    return [
        tuple(a for a in sequence if rank in layout.holders(a.stage or 0, a.index))
        + tuple(step for step in steps if step.stage in layout.held_by(rank))
        for rank in range(layout.world)
    ]


def _competition(orders: Sequence[Order], layout: Layout) -> TaskGraph:
    """Both directions' actions, which compete for their ranks."""
    # A schedule with all forwards first keeps them first; others only say when there is room for a forward.
    turns = [tuple(a.kind for a in order) for order in orders]
    mixed = any((Kind.B, Kind.F) in zip(kinds, kinds[1:]) for kinds in turns)
    waits = {
        Kind.F: (Kind.F, Kind.B, Kind.W),
        Kind.B: (Kind.B,) if mixed else (Kind.B, Kind.F),
        Kind.W: (Kind.W, Kind.B),
    }
    half, graph = layout.microbatches // 2, GraphBuilder()
    known: dict[tuple[Kind, int, int], int] = {}
    for mirrored in (0, 1):
        for order in orders:
            newest: dict[Kind, int] = {}
            for action in order:
                assert action.stage is not None
                index = action.index + mirrored * half
                urgency = (_URGENCY[action.kind] * half + action.index) * 2 + mirrored
                task = Task(Action(action.kind, index, action.stage), COMPUTE_LANE, 0)
                servers = layout.holders(action.stage, index)
                number = graph.task(task, _TIME[action.kind], OTHER, servers, urgency)
                for kind in waits[action.kind]:
                    if kind in newest:
                        graph.edge(newest[kind], number)
                newest[action.kind] = known[action.kind, action.stage, index] = number
    for (kind, stage, index), number in known.items():
        needs = {
            Kind.F: [(Kind.F, stage - 1)],
            Kind.B: [(Kind.F, stage), (Kind.B, stage + 1)],
            Kind.W: [(Kind.B, stage)],
        }
        for before in needs[kind]:
            key = (*before, index)
            if key in known:
                graph.edge(known[key], number)
    return graph.build()
