"""Redistribute tiles: fetch, replicate, re-cut and align them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from commsched.spatial.fetch import assembled, fetch
from commsched.spatial.intervals import Run, Split, Want
from commsched.spatial.linear import apply
from commsched.spatial.mesh import Mesh
from commsched.spatial.plan import Dim, Plan, make_plan
from commsched.spatial.replicated import once, spread
from commsched.spatial.tile import MOVES, Cut, Cuts, Tile, cut_axes, local_of

Wants = Mapping[int, tuple[Want, ...]]  # per mesh axis, per part along it


def plan_for(mesh: Mesh, cuts: Cuts, wants: Wants) -> Plan:
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
    """The same pixels with other owners (and margins) along some axes."""
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
        tile.mesh.gathered[tile.mesh.module] += whole.nbytes - tile.local.nbytes
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


def common_cuts(tiles: list[Tile]) -> Cuts:
    """The cuts of the result of a pointwise operation: those of the first operand that is cut, with the
    smallest margins of all.
    """
    return tuple(_common_cut(tiles, axis) for axis in range(len(tiles[0].cuts)))


def _common_cut(tiles: list[Tile], axis: int) -> Cut | None:
    cuts = [cut for tile in tiles if (cut := tile.cuts[axis]) is not None]
    if not cuts:
        return None
    wide = [cut for cut in cuts if cut.split.size > 1] or cuts
    dim, bounds = wide[0].dim, wide[0].split.bounds
    if any(cut.dim != dim for cut in wide):
        raise ValueError(
            f"{tiles[0].mesh.where('elementwise')}: the operands are cut along different dimensions, "
            f"{sorted({cut.dim for cut in wide})}; gather one of them first"
        )
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
        if own[axis] is None and len(shape) >= -cut.dim and shape[cut.dim] == cut.split.size:
            lo, hi = cut.split.held(mesh.coord[axis])
            local = local.narrow(cut.dim, lo, hi - lo)
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
            raise ValueError(
                f"{tile.mesh.where('elementwise')}: sizes {target.split.size} and {cut.split.size} of "
                f"dimension {target.dim} do not match"
            )
    if whole:
        tile = replicate(tile, tuple(whole))
    return recut(tile, targets) if targets else tile


def owned_in_held(tile: Tile) -> list[tuple[int, int, int]]:
    """(dim, start, length) of the owned pixels within what this rank holds; dimensions without margin are
    left out."""
    found = []
    for axis, cut in cut_axes(tile.cuts):
        (lo, hi), (start, stop) = (
            cut.split.owned(tile.mesh.coord[axis]),
            cut.split.held(tile.mesh.coord[axis]),
        )
        if (lo, hi) != (start, stop):
            found.append((cut.dim, lo - start, hi - lo))
    return found


def local_owned(tile: Tile) -> Tensor:
    """The owned pixels of the local part."""
    local = local_of(tile)
    for dim, lo, length in owned_in_held(tile):
        local = local.narrow(dim, lo, length)
    return local


MOVES.update(enter=enter)
