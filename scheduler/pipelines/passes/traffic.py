"""The pass that makes the lanes ``link`` (what a rank puts on the wire) and ``recv`` from the compute lane.

Placement of the data-parallel traffic, on stages with replicas:

``eager``    RS as the last backward's gradients appear, before its input gradient goes upstream; AG at once
``bubble``   the gradient goes upstream first; RS, step and AG then have the stage's own slack
``aligned``  as ``bubble``, but no stage of a group starts before the group's first one has ended its
             backward: that rank sends the others a message without content, numbered above the micro-batches

The halos that the tiles of a stage exchange stand in ``link`` with the forward or backward they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler.ir.actions import SENDS, Action, Kind
from scheduler.ir.endless_order import last_gradient, position
from scheduler.ir.layout import Layout, is_token
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE

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
        """Every rank's lanes."""
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
            reduces = [
                each
                for stage in complete.get(place, ())
                for each in self._collectives(kind, stage, action.shift)
            ]
            if action.kind in _HALO and self.layout.tile_count(action.stage or 0) > 1:
                yield Action(_HALO[action.kind], action.index, action.stage, shift=action.shift)
            if self.layout.placement == "eager":
                yield from reduces
            yield from self._send(rank, action)
            if place in complete:
                yield from self._tokens(rank, action)
            if self.layout.placement != "eager":
                yield from reduces
            if action.kind is Kind.STEP and self.layout.reduction == "scatter":
                assert action.stage is not None
                yield from self._collectives(Kind.AG, action.stage, action.shift)

    def _send(self, rank: int, action: Action) -> Iterator[Action]:
        assert action.stage is not None
        if action.kind is Kind.F and action.stage + 1 < self.layout.stages:
            kind, other = Kind.SENDF, action.stage + 1
        elif action.kind is Kind.B and action.stage > 0:
            kind, other = Kind.SENDB, action.stage - 1
        else:
            return
        for peer in self.layout.overlaps(action.stage, rank, other, action.index):
            if peer != rank:
                yield Action(kind, action.index, action.stage, peer=peer, shift=action.shift)

    def _collectives(self, kind: Kind, stage: int, shift: int) -> Iterator[Action]:
        if len(self.layout.members(stage)) > 1:
            first_due = kind is Kind.AG and self.layout.placement != "eager"
            # The bucket that the backward fills last is the one that the forward needs first.
            for bucket in self.buckets[stage][:: -1 if first_due else 1]:
                yield Action(kind, bucket, stage, shift=shift)

    def _tokens(self, rank: int, action: Action) -> Iterator[Action]:
        """To the stages of the same group: that its first stage has ended its last backward."""
        assert action.stage is not None
        group, place = divmod(action.stage, self.layout.positions)
        if self.layout.placement != "aligned" or place or self.layout.ranks[action.stage][0] != rank:
            return
        for stage in range(action.stage + 1, action.stage + self.layout.positions):
            if len(self.layout.members(stage)) > 1:
                for peer in self.layout.ranks[stage]:
                    index = self.layout.microbatches + group
                    yield Action(Kind.SENDF, index, action.stage, peer=peer, shift=action.shift)

    def _receives(self, rank: int) -> tuple[Action, ...]:
        """The messages to this rank, in the order in which they are needed; from each peer in the order in
        which that peer sends them, since a wire may deliver by order alone.
        """
        by_peer = {peer: iter(actions) for peer, actions in self.sent[rank].items()}
        coming = [(peer, action) for peer, actions in self.sent[rank].items() for action in actions]
        places = {
            (action.kind, action.stage, action.index): place
            for place, action in enumerate(self.compute[rank])
            if action.stage is not None
        }
        needed = sorted(coming, key=lambda item: self._needed_at(rank, item[0], item[1], places))
        arriving = [(peer, next(by_peer[peer])) for peer, _ in needed]
        return tuple(
            Action(_RECEIVED[sent.kind], sent.index, self._receiver(rank, sent), peer=peer, shift=sent.shift)
            for peer, sent in arriving
        )

    def _receiver(self, rank: int, sent: Action) -> int:
        assert sent.stage is not None
        if is_token(sent, self.layout):
            here = sent.stage // self.layout.positions
            return next(s for s in self.layout.held_by(rank) if s // self.layout.positions == here)
        return sent.stage + (1 if sent.kind is Kind.SENDF else -1)

    def _needed_at(self, rank: int, peer: int, sent: Action, places: Mapping[Key, int]) -> int:
        """``places``: where in the rank's compute lane each action stands."""
        order, stage = self.compute[rank], self._receiver(rank, sent)
        if is_token(sent, self.layout):
            return position(order, last_gradient(order, stage))
        kind = Kind.F if sent.kind is Kind.SENDF else Kind.B
        place = places.get((kind, stage, sent.index))
        if place is None:
            raise ValueError(
                f"rank {peer} sends {sent}, but rank {rank} never does {stage}{kind}{sent.index}"
            )
        return position(order, place)
