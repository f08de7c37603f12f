"""Padding, cropping and slicing: fetches of other runs of pixels, without arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Padding, Split, Want, Window, pad_want, spare_margin
from commsched.spatial.layout import replicate, take
from commsched.spatial.tile import Cut, Tile, cut_axes, handles, local_of, unsupported


@handles(F.pad)
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Border tiles take the padding; a circular one comes from the other end of the image.

    A margin (a wide halo) that a tile holds stays, as far as it needs no pixels of other tiles.
    """
    assert isinstance(input, Tile)
    pads = {-1 - i // 2: (int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)}
    _check_pads(input, pads, mode)
    cuts, wants, rest = list(input.cuts), {}, list(pad)
    for axis, cut in cut_axes(input.cuts):
        before, after = pads.get(cut.dim, (0, 0))
        if (before, after) == (0, 0):
            continue
        if mode == "circular":
            input.mesh.needs_other_end()
        padding = Padding(cut.split.size, before, after, mode)
        split = padding.split(cut.split)
        cuts[axis] = Cut(cut.dim, split)
        wants[axis] = tuple(padding.want(*split.held(part)) for part in range(split.parts))
        rest[2 * (-1 - cut.dim) : 2 * (-cut.dim)] = [0, 0]
    local = take(input, wants, value or 0.0)
    if any(rest):
        local = _pad_whole(local, rest, mode, value, len(pad))
    return Tile.make(local, input.mesh, tuple(cuts))


def _pad_whole(local: Tensor, pads: list[int], mode: str, value: float | None, length: int) -> Tensor:
    """Pad the dimensions that are not split."""
    if 0 in local.shape:  # torch refuses to reflect an empty part, and torch 2.6 to pad one at all
        shape = list(local.shape)
        for i, size in enumerate(pads):
            shape[-1 - i // 2] += size
        return local.reshape(shape) if 0 in shape else F.pad(local, pads)
    return F.pad(local, pads, mode, value) if mode == "constant" else F.pad(local, pads, mode)


def _check_pads(tile: Tile, pads: dict[int, tuple[int, int]], mode: str) -> None:
    limits = {"reflect": 1, "circular": 0}
    for dim, (before, after) in pads.items():
        size = tile.shape[dim]
        if mode in limits and max(before, after) > size - limits[mode]:
            raise ValueError(
                f"{tile.mesh.where('pad')}: {mode} padding of {max(before, after)} needs more than the "
                f"{size} pixels of dimension {dim}"
            )
        if size + before + after < 0 or (mode != "constant" and min(before, after) < 0):
            raise ValueError(f"{tile.mesh.where('pad')}: {mode} padding {(before, after)} of {size} pixels")


@handles(torch.roll, torch.Tensor.roll)
def roll(input: Any, shifts: Any, dims: Any = ()) -> Any:
    """``torch.roll`` as a fetch that wraps around the border."""
    moves, along = _ints(shifts), _ints(() if dims is None else dims)
    if not along:  # over the flattened tensor
        return torch.roll(replicate(input), moves)
    if len(moves) != len(along):
        raise ValueError(f"{input.mesh.where('roll')}: {len(moves)} shifts for {len(along)} dimensions")
    amounts: dict[int, int] = {}
    for shift, dim in zip(moves, along):
        dim = dim if dim < 0 else dim - input.ndim
        amounts[dim] = amounts.get(dim, 0) + shift
    cuts, wants = list(input.cuts), {}
    for axis, cut in cut_axes(input.cuts):
        shift = amounts.pop(cut.dim, 0) % cut.split.size
        if shift:
            input.mesh.needs_other_end()
            cuts[axis] = Cut(cut.dim, cut.split.with_margin((0, 0)))
            wants[axis] = tuple(_shifted(cut.split, part, shift) for part in range(cut.split.parts))
    local = take(input, wants)
    if amounts:
        local = torch.roll(local, tuple(amounts.values()), tuple(amounts))
    return Tile.make(local, input.mesh, tuple(cuts))


def _ints(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _shifted(split: Split, part: int, shift: int) -> Want:
    lo, hi = split.owned(part)
    return pad_want(lo - shift, hi - shift, split.size, "circular")


@handles(torch.Tensor.__getitem__)
def getitem(tile: Any, index: Any) -> Any:
    """Indexing that keeps the split dimensions whole, crops them, or takes every n-th pixel."""
    if not isinstance(tile, Tile):
        return unsupported(torch.Tensor.__getitem__, (tile, index), {}, "the index is split")
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(e, (int, slice)) or e is None or e is Ellipsis for e in entries):
        return unsupported(
            torch.Tensor.__getitem__, (tile, index), {}, "only ints, slices, None and ... may index"
        )
    entries = explicit(entries, tile.ndim)
    local_index: list[Any] = []
    crops: dict[int, tuple[int, int]] = {}
    dims: dict[int, int] = {}
    position = kept = 0
    for place, entry in enumerate(entries):
        if entry is None:
            local_index.append(None)
            kept += 1
            continue
        dims[position] = kept
        axis = next((a for a, cut in cut_axes(tile.cuts) if cut.dim + tile.ndim == position), None)
        if axis is not None:
            if isinstance(entry, int):
                at = range(tile.shape[position])[entry]
                one = _cropped(tile, {position - tile.ndim: (-at, at + 1 - tile.shape[position])})
                first = (*entries[:place], 0, *entries[place + 1 :])
                return replicate(one, (axis,))[first]
            lo, hi, step = entry.indices(tile.shape[position])
            if step != 1:
                tile = _strided(tile, axis, range(lo, hi, step))
            elif (lo, hi) != (0, tile.shape[position]):
                crops[position - tile.ndim] = (-lo, max(hi, lo) - tile.shape[position])
            entry = slice(None)
        local_index.append(entry)
        kept += not isinstance(entry, int)
        position += 1
    if crops:
        tile = _cropped(tile, crops)
    result = local_of(tile)[tuple(local_index)]
    cuts = tuple(
        None if cut is None else Cut(dims[cut.dim + tile.ndim] - kept, cut.split) for cut in tile.cuts
    )
    return Tile.make(result, tile.mesh, cuts)


@handles(torch.narrow, torch.Tensor.narrow)
def narrow(input: Any, dim: int, start: Any, length: int) -> Any:
    """A crop."""
    index, first = [slice(None)] * input.ndim, int(start)
    first += input.shape[dim] if first < 0 else 0
    index[dim] = slice(first, first + length)
    return getitem(input, tuple(index))


def _cropped(tile: Tile, crops: dict[int, tuple[int, int]]) -> Tile:
    """Pad by negative amounts, per dimension counted from the end."""
    amounts = [crops.get(-1 - i, (0, 0)) for i in range(tile.ndim)]
    cropped: Tile = pad(tile, [amount for pair in amounts for amount in pair])
    return cropped


def _strided(tile: Tile, axis: int, pixels: range) -> Tile:
    """``pixels`` along ``axis``: each stays with its owner, so nothing is sent."""
    cut = tile.cuts[axis]
    assert cut is not None
    window = Window(1, pixels.step, before=-pixels.start)
    split = window.split(cut.split, len(pixels))
    split = split.with_margin(spare_margin(window, cut.split, split) or (0, 0))
    part = tile.mesh.coord[axis]
    chosen, start = pixels[slice(*split.held(part))], cut.split.held(part)[0]
    own = slice(chosen.start - start, chosen.stop - start, chosen.step) if chosen else slice(0, 0)
    index = (..., own, *((slice(None),) * (-1 - cut.dim)))
    local = local_of(tile)[index]
    cuts = tuple(Cut(cut.dim, split) if a == axis else other for a, other in enumerate(tile.cuts))
    return Tile.make(local, tile.mesh, cuts)


def explicit(entries: tuple, ndim: int) -> tuple:
    """The index with ``...`` expanded, one entry per dimension."""
    named = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    missing = (slice(None),) * (ndim - named)
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        return (*entries[:at], *missing, *entries[at + 1 :])
    return (*entries, *missing)
