"""Layouts: which layers are a stage, which ranks hold it, on tiles or whole samples, and what it may keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple

from scheduler.ir.actions import Action, Kind, stage_of
from scheduler.ir.inputs import Microbatches

PLACEMENTS = ("eager", "bubble")
REDUCTIONS = ("scatter", "masters")


@dataclass(frozen=True)
class Layout:
    """The part of a pipeline program that is not an order of actions.

    ``cuts[s]``: the first layer of stage s. ``ranks[s]``: the ranks that hold it, in the order of their rows;
    where ``tiles[s]`` is a grid, the ranks of its tiles for each range of rows. With mirrored replicas, the
    ranks ``mirror[s]`` compute the second half of the micro-batches. ``versions`` and ``activations``: how
    many weight versions, and micro-batches between forward and backward, each stage is allowed to keep.
    ``reduction``: ``scatter`` (RS, step on a shard, AG) or ``masters`` (sum on each host's first rank,
    all-reduce among those, broadcast, full step). ``recompute``: stages that keep only their input and repeat
    the forward. ``memory``: bytes allowed per rank.
    """

    cuts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    microbatches: Microbatches
    versions: tuple[int, ...]
    activations: tuple[int, ...]
    placement: str = "bubble"
    reduction: str = "scatter"
    recompute: tuple[bool, ...] = ()
    memory: tuple[int, ...] | None = None
    tiles: tuple[Tiles | None, ...] = ()
    mirror: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"a pipeline needs at least 1 micro-batch, got {self.microbatches}")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"there is no placement {self.placement!r}; the placements are {', '.join(PLACEMENTS)}"
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"there is no reduction {self.reduction!r}; the reductions are {', '.join(REDUCTIONS)}"
            )
        if not self.recompute:
            object.__setattr__(self, "recompute", (False,) * self.stages)
        for name in ("ranks", "versions", "activations", "recompute", *(("tiles",) if self.tiles else ())):
            if len(getattr(self, name)) != self.stages:
                raise ValueError(
                    f"{name} must have one entry for each of the {self.stages} stages,"
                    f" got {len(getattr(self, name))}"
                )
        if self.memory is not None and len(self.memory) != self.world:
            raise ValueError(f"memory must have an entry for each of {self.world} ranks: {self.memory}")
        if list(self.cuts) != sorted(set(self.cuts)) or self.cuts[:1] != (0,):
            raise ValueError(f"cuts must start with layer 0 and rise, got {list(self.cuts)}")
        held = set(chain.from_iterable(self.ranks))
        if held != set(range(len(held))) or not all(self.ranks):
            raise ValueError(f"every stage needs ranks, numbered from 0 without gaps; got {self.ranks}")
        if sum(map(len, set(self.ranks))) != len(held):
            raise ValueError(f"two stages may share all of their ranks or none, got {self.ranks}")
        for stage, ranks in enumerate(self.ranks):
            if len(ranks) % self.tile_count(stage):
                raise ValueError(
                    f"stage {stage} is on {self.tile_count(stage)} tiles, so its ranks must be a multiple of"
                    f" that, got {len(ranks)}"
                )
        if self.mirror:
            self._check_mirror()

    def _check_mirror(self) -> None:
        sizes = [list(map(len, ranks)) for ranks in (self.ranks, self.mirror)]
        if sizes[0] != sizes[1] or set(chain.from_iterable(self.mirror)) != set(range(self.world)):
            raise ValueError(
                f"mirrored replicas need as many ranks of the same job for each stage, got {self.ranks} and"
                f" {self.mirror}"
            )
        if self.microbatches % 2 or self.placement != "bubble" or self.reduction == "masters":
            raise ValueError(
                "mirrored replicas need an even number of micro-batches, placement 'bubble' and reduction"
                f" 'scatter'; got {self.microbatches}, {self.placement!r} and {self.reduction!r}"
            )

    @property
    def stages(self) -> int:
        return len(self.cuts)

    @property
    def world(self) -> int:
        return len(set(chain.from_iterable(self.ranks)))

    @property
    def positions(self) -> int:
        """How many ranks one replica of the whole model spans."""
        return len(set(self.ranks))

    def members(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage's parameters."""
        if not self.mirror:
            return self.ranks[stage]
        return tuple(sorted({*self.ranks[stage], *self.mirror[stage]}))

    def mirrored(self, index: int) -> bool:
        """Whether a micro-batch is computed by the mirrored replicas."""
        return bool(self.mirror) and 2 * index >= self.microbatches

    def holders(self, stage: int, index: int) -> tuple[int, ...]:
        """The ranks that compute a micro-batch in a stage."""
        return self.mirror[stage] if self.mirrored(index) else self.ranks[stage]

    def held_by(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if rank in self.members(stage))

    def computed_by(self, rank: int, stage: int) -> tuple[int, ...]:
        return tuple(i for i in range(self.microbatches) if rank in self.holders(stage, i))

    def grid(self, stage: int) -> Tiles | None:
        """The tiles of a stage; None where it takes whole samples."""
        return self.tiles[stage] if self.tiles else None

    def tile_count(self, stage: int) -> int:
        tiles = self.grid(stage)
        return tiles.size if tiles else 1

    def replicas(self, stage: int) -> int:
        """Into how many ranges of rows a stage divides a micro-batch."""
        return len(self.ranks[stage]) // self.tile_count(stage)

    def place(self, stage: int, rank: int, index: int) -> tuple[int, int]:
        """Which range of a micro-batch's rows, and which tile, a rank has in a stage."""
        return divmod(self.holders(stage, index).index(rank), self.tile_count(stage))

    def tiles_with(self, rank: int, action: Action) -> tuple[int, ...]:
        """The ranks of all tiles that compute an action together with ``rank``; () for whole samples."""
        stage = stage_of(action)
        count = self.tile_count(stage)
        if count == 1 or action.index < 0:
            return ()
        holders = self.holders(stage, action.index)
        first = holders.index(rank) // count * count
        return holders[first : first + count]

    def layers(self, stage: int, total: int) -> range:
        return range(self.cuts[stage], (*self.cuts, total)[stage + 1])

    def overlaps(self, stage: int, rank: int, other: int, index: int = 0) -> dict[int, float]:
        """The ranks of stage ``other`` that exchange a part of micro-batch ``index`` with ``rank`` of
        ``stage``, and how much of it.
        """
        mine, others = self.holders(stage, index), self.holders(other, index)
        parts = shared(mine.index(rank), len(mine), self.grid(stage), len(others), self.grid(other))
        return {others[number]: share for number, share in parts}


def far_stage(action: Action) -> int:
    """The stage that data goes to or comes from."""
    return stage_of(action) + (1 if action.kind in (Kind.SENDF, Kind.RECVB) else -1)


def stages_in(layout: Layout, layers: Iterable[int], total: int) -> set[int]:
    wanted = set(layers)
    return {stage for stage in range(layout.stages) if wanted & set(layout.layers(stage, total))}


# -- placements of stages: on tiles or on whole samples, in replicas, in one direction or in both ------------

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

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a stage on whole samples needs at least 1 rank, got {self.size}")


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
    if replicas < 1 or not sizes:
        needs = "a pipeline needs at least 1 replica of at least 1 stage"
        raise ValueError(f"{needs}, got {replicas} replicas of {len(sizes)} stages")
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
    parts = []
    for other in range(others):
        there, its_tile = divmod(other, _size(other_tiles))
        # In fractions, because equal borders must be equal.
        rows = _common(mine, _rows(there, others // _size(other_tiles)))
        # Tiles of equal grids are cut alike; others may be cut in any way, so any two can overlap.
        if rows and (tiles != other_tiles or tile == its_tile):
            its = other_tiles.extent(its_tile) if other_tiles else {}
            whole = (Fraction(0), Fraction(1))
            part = prod(_common(extent.get(d, whole), its.get(d, whole)) for d in {*extent, *its})
            parts.append((other, float(rows * part)))
    return tuple(parts)


def _size(tiles: Tiles | None) -> int:
    return tiles.size if tiles else 1


def _rows(replica: int, replicas: int) -> tuple[Fraction, Fraction]:
    return Fraction(replica, replicas), Fraction(replica + 1, replicas)


def _common(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> Fraction:
    return max(Fraction(0), min(one[1], other[1]) - max(one[0], other[0]))
