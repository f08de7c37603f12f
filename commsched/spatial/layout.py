"""Redistribute tiles (fetch, replicate, re-cut and align them), and reshape them without sending pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.fetch import Dim, ExchangePlan, assembled, fetch, make_plan
from commsched.spatial.intervals import Run, Split, Want
from commsched.spatial.mesh import Mesh, apply, once, spread
from commsched.spatial.tile import (
    MOVES,
    CopiedView,
    Cut,
    Cuts,
    Tile,
    Unsupported,
    cut_axes,
    local_of,
    tree_map,
)

Wants = Mapping[int, tuple[Want, ...]]  # per mesh axis, per part along it


def plan_for(mesh: Mesh, cuts: Cuts, wants: Wants) -> ExchangePlan:
    """The plan in which every part of the axes in ``wants`` gets its pixels of a tensor cut by ``cuts``."""
    dims = []
    for axis, cut in cut_axes(cuts):
        if axis in wants:
            parts = mesh.parts(axis)
            dims.append(Dim(cut.dim, cut.split, parts, tuple(wants[axis][part] for part in parts)))
    return make_plan(mesh.rank, tuple(dims), mesh.groups(tuple(wants)))


def take(tile: Tile, wants: Wants, fill: float = 0.0) -> Tensor:
    """Fetch the pixels that this rank's part wants from their owners."""
    local = local_of(tile)
    return fetch(local, plan_for(tile.mesh, tile.cuts, wants), tile.mesh, fill) if wants else local


def held_wants(split: Split) -> tuple[Want, ...]:
    return tuple((Run(*split.held(part)),) for part in range(split.parts))


def owned_cuts(cuts: Cuts) -> Cuts:
    """``cuts`` without margins."""
    return tuple(None if c is None else Cut(c.dim, c.split.with_margin((0, 0))) for c in cuts)


def recut(tile: Tile, targets: Mapping[int, Split]) -> Tile:
    """``tile`` with its pixels owned, and held in margins, as ``targets`` says for some axes."""
    wants = {axis: held_wants(split) for axis, split in targets.items()}
    cuts = tuple(
        Cut(cut.dim, targets[axis]) if cut is not None and axis in targets else cut
        for axis, cut in enumerate(tile.cuts)
    )
    return Tile.make(take(tile, wants), tile.mesh, cuts)


def trimmed(tile: Tile) -> Tile:
    """Without margins: exactly what the rank owns."""
    targets = {
        axis: cut.split.with_margin((0, 0)) for axis, cut in cut_axes(tile.cuts) if cut.split.margin != (0, 0)
    }
    return recut(tile, targets) if targets else tile


def replicate(tile: Tile, axes: tuple[int, ...] | None = None) -> Tile:
    """All pixels on all ranks (along ``axes``). In the backward each rank takes its own slice."""
    tile = trimmed(tile)
    chosen = [axis for axis, _ in cut_axes(tile.cuts) if axes is None or axis in axes]
    if not chosen:
        return tile
    wants = {axis: tuple((Run(0, cut.split.size),) for _ in range(cut.split.parts))
             for axis, cut in cut_axes(tile.cuts) if axis in chosen}  # fmt: skip
    plan = plan_for(tile.mesh, tile.cuts, wants)
    whole = apply(assembled, local_of(tile), plan, tile.mesh, tile.mesh.module)
    if plan.remote:
        tile.mesh.gathered[tile.mesh.module] += whole.nbytes - tile.held.nbytes
    return Tile.make(
        whole, tile.mesh, tuple(None if axis in chosen else cut for axis, cut in enumerate(tile.cuts))
    )


def enter(value: Tensor, mesh: Mesh, cuts: Cuts) -> Tensor:
    """``value`` as an operand of an operation whose result is cut by ``cuts``.

    A plain tensor (a parameter) gets its gradient once where the operation is replicated; a replicated tile
    entering a cut operation collects the contributions of all tiles.
    """
    if not isinstance(value, Tile):
        if mesh.dry and not value.is_meta:  # made by the model's forward, as coordinates are
            value = value.to("meta")
        shared = tuple(axis for axis, cut in enumerate(cuts) if cut is None and mesh.grid[axis] > 1)
        if shared and value.requires_grad:
            return apply(once, value, mesh, shared, mesh.module)
        return value
    local = local_of(value)
    spread_over = tuple(
        a for a, cut in enumerate(cuts) if cut is not None and value.cuts[a] is None and mesh.grid[a] > 1
    )
    if spread_over and local.requires_grad:
        local = apply(spread, local, mesh, spread_over, mesh.module)
    return local


def parameter(value: Tensor, mesh: Mesh, cuts: Cuts) -> Tensor:
    """`enter` for an operand that every rank needs whole."""
    if isinstance(value, Tile) and not value.replicated:
        raise Unsupported("a parameter is split")
    return enter(value, mesh, cuts)


def parameters(tile: Tile, *values: Tensor | None) -> list[Any]:
    """The `parameter` of each value that is not None, for an operation on a tile."""
    return [None if value is None else parameter(value, tile.mesh, tile.cuts) for value in values]


def common_cuts(tiles: list[Tile]) -> Cuts:
    """The cuts of the result of a pointwise operation: those of the first operand that is cut, with the
    smallest margins of all. Two axes cannot cut one dimension: the first one does.
    """
    cuts: list[Cut | None] = []
    for axis in range(len(tiles[0].cuts)):
        cut = _common_cut(tiles, axis)
        cuts.append(None if cut is not None and any(c and c.dim == cut.dim for c in cuts) else cut)
    return tuple(cuts)


def _common_cut(tiles: list[Tile], axis: int) -> Cut | None:
    cuts = [cut for tile in tiles if (cut := tile.cuts[axis]) is not None]
    if not cuts:
        return None
    wide = [cut for cut in cuts if cut.split.size > 1] or cuts
    dim, bounds = wide[0].dim, wide[0].split.bounds
    if any(cut.dim != dim for cut in wide):
        dims = sorted({cut.dim for cut in wide})
        raise Unsupported(f"the operands are cut along different dimensions, {dims}")
    margins = [
        cut.split.margin_around(bounds) if cut.split.size == wide[0].split.size else (0, 0) for cut in wide
    ]
    margin = min(m[0] for m in margins), min(m[1] for m in margins)
    return Cut(dim, Split(bounds, margin))


def fit(value: Tensor, mesh: Mesh, cuts: Cuts) -> Tensor:
    """The part of an operand that meets the result's part, for operations that broadcast from the right."""
    if isinstance(value, Tile):
        value = _fit_tile(value, cuts)
    own = value.cuts if isinstance(value, Tile) else (None,) * len(cuts)
    shape = value.shape
    local = enter(value, mesh, cuts)
    for axis, cut in cut_axes(cuts):
        if own[axis] is not None or len(shape) < -cut.dim:
            continue
        if shape[cut.dim] == cut.split.size:
            lo, hi = cut.split.held(mesh.coord[axis])
            local = local.narrow(cut.dim, lo, hi - lo)
        elif cut.split.size == 1:
            raise Unsupported("it widens a split dimension of one pixel")
    return local


def _fit_tile(tile: Tile, cuts: Cuts) -> Tile:
    """``tile`` cut as ``cuts``, or replicated along axes that broadcast it or do not cut this dimension."""
    whole, targets = [], {}
    for axis, cut in cut_axes(tile.cuts):
        target = cuts[axis]
        if cut == target:
            continue
        if target is None or cut.dim != target.dim or (cut.split.size == 1 and target.split.size != 1):
            whole.append(axis)
        elif cut.split.size == target.split.size:
            targets[axis] = target.split
        else:
            sizes = f"sizes {target.split.size} and {cut.split.size}"
            raise Unsupported(f"{sizes} of dimension {target.dim} do not match")
    if whole:
        tile = replicate(tile, tuple(whole))
    return recut(tile, targets) if targets else tile


def local_owned(tile: Tile) -> Tensor:
    local_of(tile)
    return tile.owned


MOVES.update(enter=enter)


# -- reshapes: dimensions merged into one (tokens, windows) stay cut -----------------------------------------

# A `Folded` tile shows fewer dimensions than its ``base``, an ordinary tile: ``counts[i]`` dimensions of the
# base are merged into dimension ``i``. The rows of a merged dimension that a rank holds are no interval.

ON_FOLDED: dict[Any, Callable[..., Any]] = {}
"""Handlers that also act on folded tiles."""


class Folded(Tile):
    """A tile with merged dimensions. Functions that `spatial.ops.contract` does not know gather it."""

    base: Tile
    counts: tuple[int, ...]
    _whole: tuple[int, Tile] | None = None  # with the version of the base
    run: Callable[[Any, tuple, dict], Any]  # set by `commsched.spatial.ops.contract`

    @staticmethod
    def of(local: Tensor, base: Tile, counts: tuple[int, ...]) -> Folded:
        shape, place = [], 0
        for count in counts:
            shape.append(prod(base.shape[place : place + count]))
            place += count
        folded: Folded = torch.Tensor._make_wrapper_subclass(
            Folded, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        folded.held, folded.mesh, folded.cuts, folded.base, folded.counts = (
            local, base.mesh, base.cuts, base, counts,
        )  # fmt: skip
        return folded

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        raise ValueError(f"{self.mesh.where('bounds')}: a rank's rows of a reshaped tile are no interval")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Folded(shape={tuple(self.shape)}, base={self.base!r})"

    @property
    def whole(self) -> Tile:
        """The gathered tensor, kept for the next function that needs it while the base is not changed."""
        local = self.base.held
        version = -1 if local.is_inference() else local._version
        if self._whole is None or version < 0 or self._whole[0] != version:
            gathered = replicate(self.base)
            whole = Tile.make(gathered.held.reshape(tuple(self.shape)), self.mesh, gathered.cuts)
            whole.copied = (*self.copied, CopiedView("a reshape", self.base))
            self._whole = version, whole
        return self._whole[1]

    @classmethod
    def _on_parts(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        return Folded.run(func, args, kwargs)


def unfolded(tile: Tile) -> Tile:
    return tile.base if isinstance(tile, Folded) else tile


def counts_of(tile: Tensor) -> tuple[int, ...]:
    return tile.counts if isinstance(tile, Folded) else (1,) * tile.ndim


def gathered_tiles(tree: Any) -> Any:
    return tree_map(lambda t: t.whole if isinstance(t, Folded) else t, tree)


def gathered(tile: Tile) -> Tile:
    return tile.whole if isinstance(tile, Folded) else replicate(tile)


def fold(base: Tensor, counts: Sequence[int]) -> Tile:
    """``base`` with runs of ``counts`` dimensions merged; an ordinary tile where the parts stay intervals.

    Whole dimensions are merged with each other and with a cut one before them, whose split grows by them.
    """
    assert isinstance(base, Tile)
    axis_of = {cut.dim + base.ndim: axis for axis, cut in cut_axes(base.cuts)}
    factors: list[tuple[int, int | None]] = []  # local size and mesh axis
    units, merged, visible, place = dict.fromkeys(axis_of.values(), 1), [], [], 0
    for count in counts:
        own: list[tuple[int, int | None]] = []
        for dim in range(place, place + count):
            axis, size = axis_of.get(dim), base.held.shape[dim]
            if axis is None and own:
                if own[-1][1] is not None:
                    units[own[-1][1]] *= size
                own[-1] = own[-1][0] * size, own[-1][1]
            elif axis is None or own != [(1, None)]:
                own.append((size, axis))
            else:
                own = [(size, axis)]
        own = own or [(1, None)]
        factors += own
        merged.append(len(own))
        visible.append(prod(size for size, _ in own))
        place += count
    cuts = list(base.cuts)
    for dim, (_, axis) in enumerate(factors):
        old = None if axis is None else cuts[axis]
        if axis is not None and old is not None:
            split = Split(tuple(bound * units[axis] for bound in old.split.bounds))
            cuts[axis] = Cut(dim - len(factors), split)
    local = local_of(base).reshape(visible)
    inner = Tile.make(local.view([size for size, _ in factors]), base.mesh, tuple(cuts))
    return inner if len(factors) == len(merged) else Folded.of(local, inner, tuple(merged))


def reshaped(tile: Tile, sizes: Sequence[int]) -> Tile:
    """``tile`` reshaped to ``sizes``.

    A cut dimension may be split: its parts then end at multiples of the inner size (of windows), for which
    border pixels are fetched. If the new shape does not follow the cuts, the whole is gathered.
    """
    base = trimmed(unfolded(tile))
    factored = _factored(base, sizes)
    if factored is None:
        whole = gathered(tile)
        return Tile.make(whole.held.reshape(tuple(sizes)), whole.mesh, whole.cuts)
    factors, counts, units = factored
    targets = {}
    for number, cut in cut_axes(base.cuts):
        unit = units[number]
        if unit > 1:
            targets[number] = Split(tuple((bound + unit // 2) // unit * unit for bound in cut.split.bounds))
    base = recut(base, targets) if targets else base
    cuts, local = list(base.cuts), []
    for dim, (size, axis) in enumerate(factors):
        old = None if axis is None else base.cuts[axis]
        if axis is not None and old is not None:
            split = Split(tuple(bound // units[axis] for bound in old.split.bounds))
            cuts[axis] = Cut(dim - len(factors), split)
            lo, hi = split.owned(base.mesh.coord[axis])
            size = hi - lo
        local.append(size)
    parts = local_of(base).reshape(local)
    return fold(Tile.make(parts, base.mesh, tuple(cuts)), counts)


Factors = list[tuple[int, int | None]]  # size and mesh axis


def _factored(base: Tile, sizes: Sequence[int]) -> tuple[Factors, list[int], dict[int, int]] | None:
    """The dimensions of ``base`` refined so that runs of them make ``sizes``; how long these runs are; and
    the size by which each cut dimension was divided. None where that cannot be.
    """
    axis_of = {cut.dim + base.ndim: axis for axis, cut in cut_axes(base.cuts)}
    if base.numel() == 0 or any(base.shape[dim] == 1 for dim in axis_of):
        return None
    left: Factors = []
    for dim, size in enumerate(base.shape):
        if dim in axis_of or size > 1:
            _append(left, size, axis_of.get(dim))
    factors: Factors = []
    counts, units = [], dict.fromkeys(axis_of.values(), 1)
    for wanted in sizes:
        start, need = len(factors), wanted
        while need > 1:
            size, axis = left.pop(0) if left else (0, None)
            if size and need % size == 0:
                factors.append((size, axis))
                need //= size
            elif size and size % need == 0:
                factors.append((need, axis))
                if axis is not None:
                    units[axis] *= size // need
                rest: Factors = [(size // need, None)]
                for other in left:
                    _append(rest, *other)
                left, need = rest, 1
            else:
                return None
        if len(factors) == start:
            factors.append((1, None))
        counts.append(len(factors) - start)
    return None if left else (factors, counts, units)


def _append(factors: Factors, size: int, axis: int | None) -> None:
    """Adjacent whole dimensions are one."""
    if axis is None and factors and factors[-1][1] is None:
        factors[-1] = (factors[-1][0] * size, None)
    else:
        factors.append((size, axis))


MOVES.update(replicate=gathered)
