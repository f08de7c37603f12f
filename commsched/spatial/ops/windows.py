"""Shared by convolutions and poolings: fetch a buffer with every pixel that the part's outputs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.fetch import fetch
from commsched.spatial.intervals import TransposedWindow, Window, clipped, spare_margin
from commsched.spatial.layout import plan_for
from commsched.spatial.mesh import Site, Visit
from commsched.spatial.overlap import Division, Halo, overlapped
from commsched.spatial.plan import Plan
from commsched.spatial.saved import compact
from commsched.spatial.tile import Cut, Cuts, Tile, cut_axes, local_of

AnyWindow = Window | TransposedWindow


def each(value: Any, n: int) -> tuple[int, ...]:
    """An int or a sequence of one or ``n`` ints as ``n`` ints."""
    if isinstance(value, int):
        return (value,) * n
    values = tuple(int(v) for v in value)
    return values * n if len(values) == 1 else values


def cut_windows(tile: Tile, windows: Sequence[AnyWindow]) -> dict[int, AnyWindow]:
    """The windows of cut axes; ``windows`` are those of the last ``len(windows)`` dimensions."""
    found = {}
    for axis, cut in cut_axes(tile.cuts):
        if cut.dim < -len(windows):
            raise ValueError(
                f"{tile.mesh.where('window')}: dimension {cut.dim} of a tensor of shape "
                f"{tuple(tile.shape)} is split, and only the last {len(windows)} are image dimensions here"
            )
        found[axis] = windows[cut.dim]
    return found


def out_cuts(tile: Tile, windows: Mapping[int, AnyWindow], reach: int, ceil: bool = False) -> Cuts:
    """The owners of the outputs, and the margin of extra outputs a part computes: as many as its pixels
    allow, or ``reach`` if it must fetch anyway.
    """
    cuts = list(tile.cuts)
    for axis, cut in cut_axes(tile.cuts):
        window = windows[axis]
        ceiling = {"ceil": ceil} if ceil else {}
        size = window.outputs(cut.split.size, **ceiling)
        if size < 1:
            raise ValueError(
                f"{tile.mesh.where('window')}: a kernel of {window.span} pixels does not fit an image of "
                f"{cut.split.size} pixels along dimension {cut.dim}"
            )
        split = window.split(cut.split, size)
        spare = spare_margin(window, cut.split, split)
        cuts[axis] = Cut(cut.dim, split.with_margin((reach, reach) if spare is None else spare))
    return tuple(cuts)


def visit(
    tile: Tile,
    site: Site,
    plan: Plan,
    windows: Sequence[AnyWindow],
    cuts: Cuts,
    work: int,
    interior: int = 0,
) -> None:
    """Record an operation of a dry run."""
    if tile.mesh.visits is None:
        return
    local, samples = tile.local, tile.shape[0] if tile.ndim > 1 else 1
    rest = local.numel() // max(prod(local.shape[cut.dim] for _, cut in cut_axes(tile.cuts)), 1)
    sizes = {dim: windows[dim].outputs(tile.shape[dim]) for dim in range(-len(windows), 0)}
    sizes |= {cut.dim: len(range(*part_of(cut, tile, axis))) for axis, cut in cut_axes(cuts)}
    sent = plan.sent_pixels() * rest * tile.element_size()
    halo, room = 0, 1 << 30
    for axis, cut in cut_axes(tile.cuts):
        out = cuts[axis]
        assert out is not None
        for part in range(cut.split.parts):
            (lo, hi), (first, last) = out.split.owned(part), cut.split.owned(part)
            if lo < hi:
                start, stop = windows[cut.dim].need(lo, hi)
                halo, room = max(halo, first - start, stop - last), min(room, hi - lo)
    steps = [w.stride if isinstance(w, Window) else 1 / w.stride for w in windows]
    work *= samples * prod(sizes.values())
    tile.mesh.visits.append(Visit(site, plan.remote, sent, work, halo, max(steps, default=1), room, interior))


def input_plan(tile: Tile, windows: Mapping[int, AnyWindow], cuts: Cuts) -> Plan:
    """The exchange after which each part has every pixel its outputs read, with fill beyond the border."""
    wants = {}
    for axis, cut in cut_axes(tile.cuts):
        target = cuts[axis]
        assert target is not None
        needs = (windows[axis].need(*target.split.held(part)) for part in range(target.split.parts))
        wants[axis] = tuple(clipped(lo, hi, cut.split.size) for lo, hi in needs)
    return plan_for(tile.mesh, tile.cuts, wants)


def planned(tile: Tile, windows: Sequence[AnyWindow], ceil: bool = False) -> tuple[Site, Cuts, Plan]:
    """Name an operation, and find the owners of its outputs and the exchange that these need."""
    chosen, site = cut_windows(tile, windows), tile.mesh.site(tile.shape)
    cuts = out_cuts(tile, chosen, tile.mesh.fusion.get(site, 0), ceil)
    return site, cuts, input_plan(tile, chosen, cuts)


def windowed(
    tile: Tile,
    windows: Sequence[Window],
    ceil: bool,
    fill: float,
    compute: Callable[[Tensor], Tensor],
    work: int,
) -> Tile:
    """An operation with ``windows`` over the last dimensions of ``tile``.

    ``compute`` does it on a buffer that has, along the split dimensions, all padding in it. ``work`` is how
    many multiplications an output pixel of a sample takes: small operations are done in one piece.
    """
    local, mesh = local_of(tile), tile.mesh
    site, cuts, plan = planned(tile, windows, ceil)
    division = _division(tile, windows, cuts) if plan.remote else None
    interior = 0 if division is None else work * division.interior_pixels(local)
    overlaps = division is not None and mesh.overlaps(interior)
    visit(tile, site, plan, windows, cuts, work, interior if overlaps else 0)
    if division is not None and overlaps:
        return Tile.make(
            overlapped(local, Halo(plan, mesh, fill, mesh.module), division, compute), mesh, cuts
        )
    received: list[Tensor] = []
    buffer = fetch(local, plan, mesh, fill, received)
    with compact(buffer, local, plan, fill, received):
        result = compute(at_least(buffer, {cut.dim: windows[cut.dim].span for _, cut in cut_axes(cuts)}))
    return Tile.make(without(result, empty_dims(tile, cuts)), mesh, cuts)


def _division(tile: Tile, windows: Sequence[Window], cuts: Cuts) -> Division | None:
    coord = tile.mesh.coord
    held = {cut.dim: cut.split.held(coord[axis]) for axis, cut in cut_axes(tile.cuts)}
    outputs = {cut.dim: cut.split.held(coord[axis]) for axis, cut in cut_axes(cuts)}
    return Division.of({dim: windows[dim] for dim in outputs}, held, outputs)


def at_least(buffer: Tensor, lengths: Mapping[int, int]) -> Tensor:
    """``buffer`` with empty dimensions filled up with zeros.

    A rank without outputs computes one output from zeros and drops it (`without`), so that its autograd graph
    has the same exchanges as on the other ranks, in derivatives of any order.
    """
    pads = [0] * (2 * buffer.ndim)
    for dim, length in lengths.items():
        if buffer.shape[dim] == 0:
            pads[2 * (-1 - dim) + 1] = length
    return F.pad(buffer, pads) if any(pads) else buffer


def without(result: Tensor, dims: Sequence[int]) -> Tensor:
    """``result`` with no pixels along ``dims``."""
    for dim in dims:
        result = result.narrow(dim, 0, 0)
    return result


def empty_dims(tile: Tile, cuts: Cuts) -> list[int]:
    """The dimensions along which this rank has no part of the output."""
    return [cut.dim for axis, cut in cut_axes(cuts) if len(range(*part_of(cut, tile, axis))) == 0]


def part_of(cut: Cut, tile: Tile, axis: int) -> tuple[int, int]:
    return cut.split.held(tile.mesh.coord[axis])
