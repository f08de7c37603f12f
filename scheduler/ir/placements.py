"""Placements of stages: on tiles or on whole samples, in replicas, in one direction or in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

Ranks = tuple[tuple[int, ...], ...]
"""The ranks of each stage."""


@dataclass(frozen=True)
class Tiles:
    """A stage on a ``grid`` of tiles, a rank each. The grid cuts the dimensions ``dims``, counted from the
    end; ranks are in row-major order.
    """

    grid: tuple[int, ...]
    dims: tuple[int, ...] = (-2, -1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", tuple(self.grid))
        if len(self.grid) != len(self.dims) or not self.grid or min(self.grid) < 1:
            raise ValueError(
                f"a grid of tiles needs a part count of at least 1 for each of the dimensions {self.dims},"
                f" got {self.grid}"
            )

    @property
    def size(self) -> int:
        return prod(self.grid)

    def coord(self, tile: int) -> tuple[int, ...]:
        """The place of a tile in the grid."""
        return tuple(product(*map(range, self.grid)))[tile]

    def extent(self, tile: int) -> dict[int, tuple[Fraction, Fraction]]:
        """By dimension, which part of it a tile covers where all tiles are equally large."""
        return {
            dim: (Fraction(place, parts), Fraction(place + 1, parts))
            for dim, place, parts in zip(self.dims, self.coord(tile), self.grid, strict=True)
        }


@dataclass(frozen=True)
class Samples:
    """A stage on whole samples; ``size`` ranks share the samples of a micro-batch."""

    size: int = 1


Placement = Tiles | Samples


class Placed(NamedTuple):
    """The ranks of each stage for the first half of the micro-batches (all, without mirrored replicas) and
    for the second, and the tiles of each stage (empty where none is on tiles).
    """

    ranks: Ranks
    mirror: Ranks
    tiles: tuple[Tiles | None, ...]


def place(placements: Sequence[Placement], replicas: int = 1, mirrored: bool = False) -> Placed:
    """Numbers the ranks replica by replica, in each stage by stage; a mirrored replica has the ranks of its
    replica in opposite order.
    """
    sizes = [placement.size for placement in placements]
    width, starts = sum(sizes), list(accumulate(sizes, initial=0))
    if replicas < 1 or not sizes or min(sizes) < 1:
        raise ValueError(
            f"a pipeline needs at least 1 replica of stages on at least 1 rank each, got {replicas} replicas"
            f" of stages on {sizes} ranks"
        )
    lines = [range(number * width, (number + 1) * width) for number in range(replicas)]

    def ranks(way: int) -> Ranks:
        return tuple(
            tuple(rank for line in lines for rank in line[::way][start : start + size])
            for start, size in zip(starts, sizes, strict=False)
        )

    tiles = tuple(each if isinstance(each, Tiles) else None for each in placements)
    return Placed(ranks(1), ranks(-1) if mirrored else (), tiles if any(tiles) else ())


@lru_cache(maxsize=1 << 16)
def shared(
    number: int, count: int, tiles: Tiles | None, others: int, other_tiles: Tiles | None
) -> tuple[tuple[int, float], ...]:
    """Which of a neighbouring stage's ``others`` holders need something that holder ``number`` of ``count``
    has, or the other way round, and which part of a micro-batch that is (with equal tiles). Holders are
    numbered replica by replica, tile by tile.
    """
    replica, tile = divmod(number, _size(tiles))
    mine = _rows(replica, count // _size(tiles))
    extent = tiles.extent(tile) if tiles else {}
    found = []
    for other in range(others):
        there, its_tile = divmod(other, _size(other_tiles))
        # In fractions, because equal borders must be equal.
        rows = _common(mine, _rows(there, others // _size(other_tiles)))
        # Tiles of equal grids are cut alike; others may be cut in any way, so any two can overlap.
        if rows and (tiles != other_tiles or tile == its_tile):
            its = other_tiles.extent(its_tile) if other_tiles else {}
            whole = (Fraction(0), Fraction(1))
            part = prod(_common(extent.get(d, whole), its.get(d, whole)) for d in {*extent, *its})
            found.append((other, float(rows * part)))
    return tuple(found)


def _size(tiles: Tiles | None) -> int:
    return tiles.size if tiles else 1


def _rows(replica: int, replicas: int) -> tuple[Fraction, Fraction]:
    return Fraction(replica, replicas), Fraction(replica + 1, replicas)


def _common(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> Fraction:
    return max(Fraction(0), min(one[1], other[1]) - max(one[0], other[0]))
