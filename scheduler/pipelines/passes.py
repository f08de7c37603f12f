"""The passes that complete an order of computation: mirrored replicas, steps, and traffic."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Mapping, Sequence

from scheduler.ir.actions import (
    SENDS,
    Action,
    Kind,
    first_forward,
    first_use,
    last_gradient,
    position,
    stage_of,
)
from scheduler.ir.layout import Layout, far_stage
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE
from scheduler.pipelines.schedules import Order

# -- mirrored replicas (GEMS): one order for each rank -------------------------------------------------------

# A rank with little to do in one direction has much to do in the other. Two stages on two ranks, two
# micro-batches in each direction; 2 and 3 are those of the mirrored replica:
#
#     time     0    1    2    3    4    5    6    7    8    9    10   11
#     rank 0   0F0  1F2  1B2  .    0B0  .    0F1  1F3  1B3  .    0B1  .
#     rank 1   0F2  1F0  1B0  .    0B2  .    0F3  1F1  1B1  .    0B3  .
#
# Each direction keeps no more micro-batches than the schedule does. If both can run on a rank, backwards go
# first, then the oldest micro-batch, which frees memory. One sequence is made for all ranks, and each does
# its part of it in that order: whatever waits for something stands after it, on every rank, so nothing waits
# for ever. Steps come last, in one order on all ranks, because a stage's gradient is complete at different
# times on its ranks.

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
    data = {Kind.F: [(Kind.F, -1)], Kind.B: [(Kind.F, 0), (Kind.B, 1)], Kind.W: [(Kind.B, 0)]}
    for action in needs:
        before = (Action(kind, action.index, stage_of(action) + step) for kind, step in data[action.kind])
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


# -- STEP, between a stage's last backward and the first forward that needs it -------------------------------


def with_steps(order: Sequence[Action], relaxed: Container[int]) -> tuple[Action, ...]:
    """The order with a STEP for each stage: as soon as its gradient is complete; for ``relaxed`` stages in
    the middle of the gap, which leaves the RS before and the AG after it half of the slack each.
    """
    inserted: dict[int, list[Action]] = {}
    for stage in sorted({stage_of(action) for action in order}):
        last = position(order, last_gradient(order, stage))
        due = first_use(order, first_forward(order, stage))
        if due <= last:
            raise ValueError(
                f"{order[first_forward(order, stage)]} needs a version of stage {stage} whose gradient"
                f" {order[last_gradient(order, stage)]} completes later in the same order"
            )
        after = last + (due - 1 - last) // 2 if stage in relaxed else last
        iteration, place = divmod(after, len(order))
        inserted.setdefault(place, []).append(Action(Kind.STEP, stage=stage, shift=-iteration))
    return tuple(each for place, action in enumerate(order) for each in (action, *inserted.get(place, ())))


# -- the lanes link (what a rank puts on the wire) and recv, from the compute lane ---------------------------

# Placement of the data-parallel traffic, on stages with replicas:
#
# ``eager``    RS as the last backward's gradients appear, before its input gradient goes upstream; AG at once
# ``bubble``   the gradient goes upstream first; RS, step and AG then have the stage's own slack
#
# The halos that the tiles of a stage exchange stand in ``link`` with the forward or backward they belong to.

Key = tuple[Kind, int, int]
"""Kind, stage and index of an action."""

_HALO = {Kind.F: Kind.HALO, Kind.B: Kind.HALOB}
_RECEIVED = {Kind.SENDF: Kind.RECVF, Kind.SENDB: Kind.RECVB}


class Traffic:
    """``compute[r]`` is rank r's compute lane, with steps; ``buckets[s]`` are the numbers of stage s's
    buckets.
    """

    def __init__(
        self, layout: Layout, compute: Sequence[tuple[Action, ...]], buckets: Mapping[int, Sequence[int]]
    ) -> None:
        self.layout, self.compute, self.buckets = layout, compute, buckets
        self.links = [tuple(self._link(rank)) for rank in range(layout.world)]
        # By receiver and sender: what comes, in the order in which it is sent.
        self.sent: list[dict[int, list[Action]]] = [{} for _ in self.links]
        for peer, link in enumerate(self.links):
            for action in link:
                if action.kind in SENDS and action.peer is not None:
                    self.sent[action.peer].setdefault(peer, []).append(action)

    def lanes(self) -> list[dict[str, tuple[Action, ...]]]:
        return [
            {COMPUTE_LANE: self.compute[rank], LINK_LANE: self.links[rank], RECV_LANE: self._receives(rank)}
            for rank in range(self.layout.world)
        ]

    def _link(self, rank: int) -> Iterator[Action]:
        order = self.compute[rank]
        complete = {last_gradient(order, stage): [stage] for stage in self.layout.held_by(rank)}
        if self.layout.mirror:
            # A stage's ranks complete its gradient at different times: all sums come last, in one order.
            complete = {max(complete): sorted(self.layout.held_by(rank), reverse=True)}
        for place, action in enumerate(order):
            kind = Kind.RS if self.layout.reduction == "scatter" else Kind.AR
            done = complete.get(place, ())
            reduces = [each for stage in done for each in self._collectives(kind, stage, action.shift)]
            if action.kind in _HALO and self.layout.tile_count(action.stage or 0) > 1:
                yield Action(_HALO[action.kind], action.index, action.stage, shift=action.shift)
            if self.layout.placement == "eager":
                yield from reduces
            yield from self._send(rank, action)
            if self.layout.placement != "eager":
                yield from reduces
            if action.kind is Kind.STEP and self.layout.reduction == "scatter":
                yield from self._collectives(Kind.AG, stage_of(action), action.shift)

    def _send(self, rank: int, action: Action) -> Iterator[Action]:
        stage = stage_of(action)
        if action.kind is Kind.F and stage + 1 < self.layout.stages:
            kind, other = Kind.SENDF, stage + 1
        elif action.kind is Kind.B and stage > 0:
            kind, other = Kind.SENDB, stage - 1
        else:
            return
        for peer in self.layout.overlaps(stage, rank, other, action.index):
            if peer != rank:
                yield Action(kind, action.index, stage, peer=peer, shift=action.shift)

    def _collectives(self, kind: Kind, stage: int, shift: int) -> Iterator[Action]:
        if len(self.layout.members(stage)) > 1:
            first_due = kind is Kind.AG and self.layout.placement != "eager"
            # The bucket that the backward fills last is the one that the forward needs first.
            for bucket in self.buckets[stage][:: -1 if first_due else 1]:
                yield Action(kind, bucket, stage, shift=shift)

    def _receives(self, rank: int) -> tuple[Action, ...]:
        """The messages to this rank, in the order in which they are needed; from each peer in the order in
        which that peer sends them, since a wire may deliver by order alone.
        """
        by_peer = {peer: iter(actions) for peer, actions in self.sent[rank].items()}
        coming = [(peer, action) for peer, actions in self.sent[rank].items() for action in actions]
        places = {(a.kind, stage_of(a), a.index): place for place, a in enumerate(self.compute[rank])}
        needed = sorted(coming, key=lambda item: self._needed_at(rank, item[0], item[1], places))
        arriving = [(peer, next(by_peer[peer])) for peer, _ in needed]
        return tuple(
            Action(_RECEIVED[sent.kind], sent.index, far_stage(sent), peer=peer, shift=sent.shift)
            for peer, sent in arriving
        )

    def _needed_at(self, rank: int, peer: int, sent: Action, places: Mapping[Key, int]) -> int:
        """``places``: where in the rank's compute lane each action stands."""
        stage = far_stage(sent)
        kind = Kind.F if sent.kind is Kind.SENDF else Kind.B
        place = places.get((kind, stage, sent.index))
        if place is None:
            raise ValueError(
                f"rank {peer} sends {sent}, but rank {rank} never does {stage}{kind}{sent.index}"
            )
        return position(self.compute[rank], place)
