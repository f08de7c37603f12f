"""Exchange plans: which rank sends which rectangle to which. Computed from splits and wants alone, without
communication, so all ranks get the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from commsched.spatial.intervals import Fill, Interval, Run, Split, Want, want_length

Slices = tuple[Interval, ...]


@dataclass(frozen=True)
class Dim:
    """One tensor dimension of a fetch, over all ranks.

    ``parts[r]`` is the part of ``split`` that rank ``r`` holds and ``wants[r]`` the pixels it asks for.
    """

    dim: int
    split: Split
    parts: tuple[int, ...]
    wants: tuple[Want, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle: ``src`` in the sender's tile, ``dst`` in the receiver's buffer, read backwards along
    ``flips``."""

    src: Slices
    dst: Slices
    flips: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.src)

    @property
    def pixels(self) -> int:
        return prod(self.shape)


Exchange = tuple[tuple[int, tuple[Piece, ...]], ...]


@dataclass(frozen=True)
class Plan:
    """One rank's share of a fetch. ``sends`` and ``recvs``: peers in rank order, each with its pieces."""

    rank: int
    dims: tuple[int, ...]
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    own: tuple[Piece, ...]
    sends: Exchange
    recvs: Exchange
    filled: bool
    remote: bool

    @property
    def plain(self) -> bool:
        """Whether the result is one unflipped rectangle of this rank's own tile."""
        one = len(self.own) == 1 and not self.own[0].flips and self.own[0].shape == self.wanted
        return one and not self.sends and not self.recvs

    def sent_pixels(self) -> int:
        return sum(piece.pixels for _, pieces in self.sends for piece in pieces)


def pieces(have: Slices, origin: tuple[int, ...], wants: tuple[Want, ...]) -> tuple[Piece, ...]:
    """Rectangles of ``wants`` that lie in the box ``have``; ``origin`` is where the sender's tile begins."""
    found = (list(_overlaps(box, want)) for box, want in zip(have, wants))
    return tuple(_piece(combination, origin) for combination in product(*found))


def _overlaps(have: Interval, want: Want) -> Iterator[tuple[Interval, Interval, bool]]:
    position = 0
    for part in want:
        if isinstance(part, Run):
            lo, hi = max(have[0], part.lo), min(have[1], part.hi)
            if lo < hi:
                at = position + (part.hi - hi if part.flip else lo - part.lo)
                yield (lo, hi), (at, at + hi - lo), part.flip
        position += len(part)


def _piece(combination: Iterable[tuple[Interval, Interval, bool]], origin: tuple[int, ...]) -> Piece:
    parts = list(combination)
    src = tuple((lo - start, hi - start) for ((lo, hi), _, _), start in zip(parts, origin))
    return Piece(
        src, tuple(dst for _, dst, _ in parts), tuple(i for i, (_, _, flip) in enumerate(parts) if flip)
    )


def _have(axis: Dim, source: int, target: int) -> Interval:
    """The pixels that ``source`` sends to ``target``: all it holds along a dimension that both cut alike,
    else those that it owns and ``target`` does not hold.
    """
    part, other = axis.parts[source], axis.parts[target]
    if part == other:
        return axis.split.held(part)
    (lo, hi), held = axis.split.owned(part), axis.split.held(other)
    if held[0] == held[1]:
        return lo, hi
    return (max(lo, held[1]), hi) if part > other else (lo, min(hi, held[0]))


@lru_cache(maxsize=4096)
def make_plan(rank: int, dims: tuple[Dim, ...], groups: tuple[int, ...]) -> Plan:
    """The share of ``rank``. Only ranks with the same entry of ``groups`` exchange pixels."""
    origins = [tuple(axis.split.held(axis.parts[r])[0] for axis in dims) for r in range(len(groups))]

    def between(source: int, target: int) -> tuple[Piece, ...]:
        wants = tuple(axis.wants[target] for axis in dims)
        have = tuple(_have(axis, source, target) for axis in dims)
        return pieces(have, origins[source], wants)

    peers = [r for r, group in enumerate(groups) if group == groups[rank] and r != rank]
    sends = tuple((peer, found) for peer in peers if (found := between(rank, peer)))
    recvs = tuple((peer, found) for peer in peers if (found := between(peer, rank)))
    boxes = [axis.split.held(axis.parts[rank]) for axis in dims]
    wanted = tuple(want_length(axis.wants[rank]) for axis in dims)
    filled = any(isinstance(part, Fill) for axis in dims for part in axis.wants[rank])
    return Plan(
        rank=rank,
        dims=tuple(axis.dim for axis in dims),
        held=tuple(hi - lo for lo, hi in boxes),
        wanted=wanted,
        own=between(rank, rank),
        sends=sends,
        recvs=recvs,
        filled=filled,
        remote=not all(_covered(dims, target) for target in range(len(groups))),
    )


def _covered(dims: tuple[Dim, ...], target: int) -> bool:
    """Whether ``target`` already holds all it wants. An empty box wants nothing."""
    wants = [axis.wants[target] for axis in dims]
    if any(want_length(want) == 0 for want in wants):
        return True
    runs = ((axis.split.held(axis.parts[target]), part) for axis, want in zip(dims, wants) for part in want)
    return all(lo <= part.lo and part.hi <= hi for (lo, hi), part in runs if isinstance(part, Run))
