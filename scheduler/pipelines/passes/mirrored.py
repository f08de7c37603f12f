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

import heapq
from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.layout import Layout
from scheduler.pipelines.schedules.orders import Order

_TIME = {Kind.F: 1, Kind.B: 2, Kind.W: 1}
_URGENCY = {Kind.B: 0, Kind.F: 1, Kind.W: 2}


def in_both_directions(orders: Sequence[Order], layout: Layout) -> list[Order]:
    """Each rank's order; ``orders`` are those of the positions, for the micro-batches of one direction."""
    if any(action.shift or action.version for order in orders for action in order):
        raise ValueError(
            "mirrored replicas need a schedule in which every step ends before the next one begins, such as"
            " gpipe or 1f1b"
        )
    sequence = _competed(_needs(orders, layout), layout)
    steps = [Action(Kind.STEP, stage=stage) for stage in reversed(range(layout.stages))]
    return [
        tuple(a for a in sequence if rank in layout.holders(a.stage or 0, a.index))
        + tuple(step for step in steps if step.stage in layout.held_by(rank))
        for rank in range(layout.world)
    ]


def _needs(orders: Sequence[Order], layout: Layout) -> dict[Action, set[Action]]:
    """Both directions' actions, and what each waits for."""
    # A schedule with all forwards first keeps them first; others only say when there is room for a forward.
    turns = [tuple(a.kind for a in order) for order in orders]
    mixed = any((Kind.B, Kind.F) in zip(kinds, kinds[1:]) for kinds in turns)
    waits = {
        Kind.F: (Kind.F, Kind.B, Kind.W),
        Kind.B: (Kind.B,) if mixed else (Kind.B, Kind.F),
        Kind.W: (Kind.W, Kind.B),
    }
    needs: dict[Action, set[Action]] = {}
    for first in (0, layout.microbatches // 2):
        for order in orders:
            newest: dict[Kind, Action] = {}
            for action in order:
                mine = Action(action.kind, action.index + first, action.stage)
                needs[mine] = {newest[kind] for kind in waits[action.kind] if kind in newest}
                newest[action.kind] = mine
    for action in needs:
        assert action.stage is not None
        data = {
            Kind.F: [(Kind.F, action.stage - 1)],
            Kind.B: [(Kind.F, action.stage), (Kind.B, action.stage + 1)],
            Kind.W: [(Kind.B, action.stage)],
        }
        before = (Action(kind, action.index, stage) for kind, stage in data[action.kind])
        needs[action] |= {each for each in before if each in needs}
    return needs


def _competed(needs: dict[Action, set[Action]], layout: Layout) -> list[Action]:
    """The actions in the order in which they start where they compete for their ranks: of those that wait for
    nothing and whose ranks are all free, the most urgent one starts.
    """
    half, place = layout.microbatches // 2, {action: number for number, action in enumerate(needs)}
    after: dict[Action, list[Action]] = {action: [] for action in needs}
    for action, before in needs.items():
        for each in before:
            after[each].append(action)

    def urgency(action: Action) -> tuple[int, int, int, int]:
        return _URGENCY[action.kind], action.index % half, action.index // half, place[action]

    def ranks(action: Action) -> tuple[int, ...]:
        return layout.holders(action.stage or 0, action.index)

    ready = [action for action, before in needs.items() if not before]
    running: list[tuple[int, int, Action]] = []  # by end
    busy: set[int] = set()
    now, sequence = 0, list[Action]()
    while ready:
        for action in sorted(ready, key=urgency):
            if busy.isdisjoint(ranks(action)):
                busy.update(ranks(action))
                heapq.heappush(running, (now + _TIME[action.kind], place[action], action))
                ready.remove(action)
                sequence.append(action)
        now = running[0][0]
        while running and (running[0][0] == now or not ready):
            now, _, ended = heapq.heappop(running)
            busy.difference_update(ranks(ended))
            for action in after[ended]:
                needs[action].remove(ended)
                if not needs[action]:
                    ready.append(action)
    if len(sequence) < len(needs):
        raise ValueError("mirrored replicas cannot run this schedule: its actions wait for each other")
    return sequence
