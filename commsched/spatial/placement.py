"""Where the stages of a model run: on tiles of the image or on shares of the samples, and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commsched.spatial.fuse import meta_state
from commsched.spatial.intervals import Split
from commsched.spatial.layout import owned_cuts
from commsched.spatial.mesh import Mesh
from commsched.spatial.plan import Slices
from commsched.spatial.tile import Cut, Cuts, Tile, cut_axes
from commsched.transport.channel import SilentChannel


@dataclass(frozen=True)
class Tiles:
    """A stage on a ``grid`` of tiles, a rank each."""

    grid: tuple[int, ...]
    dims: tuple[int, ...] = (-2, -1)

    @property
    def size(self) -> int:
        return prod(self.grid)


@dataclass(frozen=True)
class Samples:
    """A stage on whole images; ``size`` ranks share the samples of a micro-batch."""

    size: int = 1


Placement = Tiles | Samples


@dataclass(frozen=True)
class Value:
    """A tensor between two stages: shape of all samples of a micro-batch, and how tiles cut it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: Cuts = ()

    def boxes(self, placement: Placement) -> tuple[Slices, ...]:
        """What each rank of the stage holds of it, in every dimension."""
        if isinstance(placement, Samples):
            split = Split.even(self.shape[0], placement.size)
            rest = tuple((0, size) for size in self.shape[1:])
            return tuple((split.owned(rank), *rest) for rank in range(placement.size))
        mesh = _dry_mesh(placement)
        return tuple(self._box(mesh.coords[rank]) for rank in range(placement.size))

    def _box(self, coord: tuple[int, ...]) -> Slices:
        box = [(0, size) for size in self.shape]
        for axis, cut in cut_axes(self.cuts):
            box[cut.dim] = cut.split.owned(coord[axis])
        return tuple(box)


def _dry_mesh(placement: Tiles, rank: int = 0) -> Mesh:
    mesh = Mesh(SilentChannel(rank, placement.size), placement.grid, placement.dims, overlap="off")
    mesh.dry = True
    return mesh


def entering(value: Value, before: Placement | None, placement: Placement) -> Value:
    """``value`` as a stage takes it: cut as it was where the grid is the same, else in even tiles."""
    if isinstance(placement, Samples):
        return Value(value.shape, value.dtype)
    if before == placement:
        return value
    splits = _dry_mesh(placement).even_splits(value.shape)
    cuts = tuple(Cut(dim, split) if split.parts > 1 else None for dim, split in zip(placement.dims, splits))
    return Value(value.shape, value.dtype, cuts)


def trace(
    stages: Sequence[nn.Module], placements: Sequence[Placement], image: Value
) -> tuple[list[tuple[Value, ...]], list[tuple[Value, ...]]]:
    """What each stage takes and returns, by running them without data."""
    taken: list[tuple[Value, ...]] = []
    returned: list[tuple[Value, ...]] = []
    values: tuple[Value, ...] = (image,)
    before: Placement | None = None
    for number, (stage, placement) in enumerate(zip(stages, placements)):
        values = tuple(entering(value, before, placement) for value in values)
        taken.append(values)
        values = _run(stage, placement, values)
        if number + 1 < len(stages):
            _check(number, placement, values)
        returned.append(values)
        before = placement
    return taken, returned


def _run(stage: nn.Module, placement: Placement, values: tuple[Value, ...]) -> tuple[Value, ...]:
    mesh = _dry_mesh(placement) if isinstance(placement, Tiles) else None
    inputs = [_meta(value, placement, mesh) for value in values]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = functional_call(stage, meta_state(stage), (as_one(inputs),))
    return tuple(
        Value(tuple(out.shape), out.dtype, owned_cuts(out.cuts) if isinstance(out, Tile) else ())
        for out in as_many(output)
    )


def _meta(value: Value, placement: Placement, mesh: Mesh | None) -> Tensor:
    """``value`` without data: all samples of it, or the first tile."""
    if mesh is None:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    size = [hi - lo for lo, hi in value.boxes(placement)[0]]
    local = torch.empty(size, dtype=value.dtype, device="meta")
    return Tile.make(local, mesh, value.cuts)


def _check(number: int, placement: Placement, values: tuple[Value, ...]) -> None:
    if not isinstance(placement, Tiles):
        return
    for value in values:
        whole = [axis for axis, parts in enumerate(placement.grid) if parts > 1 and value.cuts[axis] is None]
        if whole:
            raise ValueError(
                f"stage {number} runs on tiles and returns a tensor of shape {value.shape} that every rank"
                f" holds whole along mesh axes {whole}; only the last stage may, so let the next stage begin"
                " before the operation that makes it whole"
            )


def as_one(values: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """What a module is called with: a tensor, or a tuple where there are several."""
    return values[0] if len(values) == 1 else tuple(values)


def as_many(output: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def rank_orders(
    placements: Sequence[Placement], replicas: int, mirrored: bool, world: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By replica and stage the ranks that hold it. Mirrored replicas come last, on the others' ranks."""
    width = sum(placement.size for placement in placements)
    if replicas < 1 or width * replicas != world:
        parts = " + ".join(str(placement.size) for placement in placements)
        raise ValueError(
            f"{replicas} replicas of stages on {parts} ranks need {width * max(replicas, 1)} ranks, and there"
            f" are {world}"
        )
    forward = [range(number * width, (number + 1) * width) for number in range(replicas)]
    lines = [list(line) for line in forward]
    lines += [list(line)[::-1] for line in forward] if mirrored else []
    starts = [sum(p.size for p in placements[:number]) for number in range(len(placements))]
    return tuple(
        tuple(tuple(line[start : start + p.size]) for start, p in zip(starts, placements)) for line in lines
    )
