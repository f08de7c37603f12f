"""From the ranks of one stage to those of the next: tiles to a rank, to shares of samples, to other tiles.

Who holds which box is all that matters: every overlap of a box that is there with one that is wanted is a
message. The way back is the transposed plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comm_core import Traffic
from commsched.spatial.fetch import buffer_for, own_pixels, pack, place, unpack
from commsched.spatial.intervals import Run
from commsched.spatial.plan import Plan, Slices, pieces
from commsched.transport.channel import DistChannel, Pending


def moves(rank: int, have: Mapping[int, Slices], want: Mapping[int, Slices]) -> Plan:
    """The share of ``rank`` in bringing every wanted box together from the boxes that there are."""
    ndim = len(next(iter(have.values())))
    nowhere: Slices = ((0, 0),) * ndim

    def between(source: int, target: int) -> tuple:
        if source not in have or target not in want:
            return ()
        box = have[source]
        return pieces(box, tuple(lo for lo, _ in box), tuple((Run(lo, hi),) for lo, hi in want[target]))

    def lengths(box: Slices) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in box)

    others = sorted((have.keys() | want.keys()) - {rank})
    return Plan(
        rank=rank,
        dims=tuple(range(-ndim, 0)),
        held=lengths(have.get(rank, nowhere)),
        wanted=lengths(want.get(rank, nowhere)),
        own=between(rank, rank),
        sends=tuple((peer, found) for peer in others if (found := between(rank, peer))),
        recvs=tuple((peer, found) for peer in others if (found := between(peer, rank))),
        filled=False,
        remote=True,
    )


class Crossing:
    """One rank's end of the way of one tensor between two stages of a replica.

    ``send`` and ``receive`` are for the forward, ``send_back`` and ``receive_back`` for its gradient; a rank
    of both stages gives what it keeps for itself to ``receive`` and ``receive_back``.
    """

    def __init__(
        self, plan: Plan, dtype: torch.dtype, group: object, lanes: tuple[int, int], timeout: float, name: str
    ) -> None:
        self.plan, self.dtype, self.name = plan, dtype, name

        def channel(lane: int) -> DistChannel:
            return DistChannel(group, timeout=timeout, traffic=Traffic.activation, lane=lane)

        # Sending and receiving count their messages apart: a rank of both stages does them at other times.
        self._out, self._in = channel(lanes[0]), channel(lanes[0])
        self._back_out, self._back_in = channel(lanes[1]), channel(lanes[1])

    def send(self, value: Tensor) -> Pending:
        plan = self.plan
        parcels = [(peer, pack(value, plan.dims, [(p.src, ()) for p in found])) for peer, found in plan.sends]
        return self._out.exchange(parcels, [], self.name)

    def receive(self, own: Tensor | None) -> Tensor:
        like = torch.empty(self.plan.wanted, dtype=self.dtype)
        parcels = [(peer, buffer_for(like, self.plan, found)) for peer, found in self.plan.recvs]
        pending = self._in.exchange([], parcels, self.name)
        out = like if own is None else own_pixels(own, self.plan, 0.0)
        pending.wait()
        return place(out, self.plan, [buffer for _, buffer in parcels])

    def send_back(self, grad: Tensor) -> Pending:
        plan = self.plan
        parcels = [(peer, pack(grad, plan.dims, [(p.dst, ()) for p in found])) for peer, found in plan.recvs]
        return self._back_out.exchange(parcels, [], f"gradient of {self.name}")

    def receive_back(self, own: Tensor | None) -> Tensor:
        plan = self.plan
        total = torch.zeros(plan.held, dtype=self.dtype)
        parcels = [(peer, buffer_for(total, plan, found)) for peer, found in plan.sends]
        self._back_in.exchange([], parcels, f"gradient of {self.name}").wait()
        for (_, buffer), (_, found) in zip(parcels, plan.sends):
            for piece, part in zip(found, unpack(buffer, total, plan, found)):
                _at(total, piece.src).add_(part)
        if own is not None:
            for piece in plan.own:
                _at(total, piece.src).add_(_at(own, piece.dst))
        return total


def _at(x: Tensor, box: Slices) -> Tensor:
    return x[tuple(slice(lo, hi) for lo, hi in box)]


def by_rank(ranks: Sequence[int], boxes: Sequence[Slices]) -> dict[int, Slices]:
    return dict(zip(ranks, boxes, strict=True))
