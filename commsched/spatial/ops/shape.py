"""Concatenating, permuting, reshaping, padding, cropping and slicing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Padding, Run, Split, Want, Window, pad_want, spare_margin
from commsched.spatial.layout import (
    ON_FOLDED,
    common_cuts,
    fit,
    owned_cuts,
    recut,
    replicate,
    reshaped,
    take,
    trimmed,
)
from commsched.spatial.mesh import Mesh
from commsched.spatial.tile import (
    HANDLERS,
    Cut,
    Cuts,
    Tile,
    Unsupported,
    cut_axes,
    handles,
    local_of,
    sizes_of,
    tiles_in,
)

_T = torch.Tensor


@handles(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Any, dim: int = 0) -> Any:
    """Along whole dimensions locally; along a split one the result is cut evenly and pixels are fetched."""
    tiles = list(tiles_in(tensors))
    mesh, cuts = tiles[0].mesh, common_cuts(tiles)
    dim = dim if dim < 0 else dim - tiles[0].ndim
    axis = next((a for a, cut in cut_axes(cuts) if cut.dim == dim), None)
    if axis is None:
        return Tile.make(torch.cat([fit(t, mesh, cuts) for t in tensors], dim), mesh, cuts)
    return _cat_split([trimmed(_cut_along(t, mesh, cuts, axis)) for t in tensors], axis, dim)


def _cut_along(value: Tensor, mesh: Mesh, cuts: Cuts, axis: int) -> Tile:
    """``value`` cut along ``axis``, too: evenly if it was whole on every rank."""
    if isinstance(value, Tile) and value.cuts[axis] is not None:
        return value
    cut = cuts[axis]
    assert cut is not None
    split = Split.shares(value.shape[cut.dim], mesh.grid[axis])
    own = list(value.cuts) if isinstance(value, Tile) else list(owned_cuts(cuts))
    own = [None if other is not None and other.dim == cut.dim else other for other in own]
    own[axis] = Cut(cut.dim, split)
    return Tile.make(fit(value, mesh, tuple(own)), mesh, tuple(own))


def _cat_split(tiles: list[Tile], axis: int, dim: int) -> Tile:
    mesh, size = tiles[0].mesh, sum(tile.shape[dim] for tile in tiles)
    split = Split.shares(size, mesh.grid[axis])
    cuts = tuple(Cut(dim, split) if a == axis else cut for a, cut in enumerate(tiles[0].cuts))
    parts, offset = [], 0
    for tile in tiles:
        length = tile.shape[dim]
        wants = tuple(_within(*split.owned(part), offset, length) for part in range(split.parts))
        own = tuple(tile.cuts[a] if a == axis else cut for a, cut in enumerate(cuts))
        local = take(Tile.make(fit(tile, mesh, own), mesh, own), {axis: wants})
        parts.append(local)
        offset += length
    return Tile.make(torch.cat(parts, dim), mesh, cuts)


def _within(lo: int, hi: int, offset: int, length: int) -> Want:
    start, stop = max(lo - offset, 0), min(hi - offset, length)
    return (Run(start, stop),) if start < stop else ()


@handles(torch.stack)
def stack(tensors: Any, dim: int = 0) -> Any:
    return cat([t.unsqueeze(dim) for t in tensors], dim)


PERMUTATIONS: dict[Any, Callable[..., list[int]]] = {}
"""Of a number of dimensions and the function's arguments: the new order of the dimensions."""


def _permutes(*functions: Any) -> Callable[[Callable[..., list[int]]], Callable[..., list[int]]]:
    def register(order_of: Callable[..., list[int]]) -> Callable[..., list[int]]:
        @handles(*functions)
        def permuted(input: Any, *args: Any, **options: Any) -> Any:
            order = order_of(input.ndim, *args, **options)
            cuts = tuple(
                None if cut is None else Cut(order.index(cut.dim + input.ndim) - input.ndim, cut.split)
                for cut in input.cuts
            )
            return Tile.make(local_of(input).permute(order), input.mesh, cuts)

        PERMUTATIONS.update(dict.fromkeys(functions, order_of))
        return order_of

    return register


@_permutes(torch.permute, _T.permute)
def permute(n: int, *given: Any, dims: Any = ()) -> list[int]:
    return [d % n for d in sizes_of(given or (dims,))]


@_permutes(torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims)
def transpose(n: int, dim0: int, dim1: int) -> list[int]:
    order = list(range(n))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return order


@_permutes(torch.movedim, _T.movedim, torch.moveaxis, _T.moveaxis)
def movedim(n: int, source: Any, destination: Any) -> list[int]:
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    placed = {t % n: s % n for s, t in zip(sources, targets)}
    rest = iter(d for d in range(n) if d not in placed.values())
    return [placed[i] if i in placed else next(rest) for i in range(n)]


_reshapes = partial(handles, into=(HANDLERS, ON_FOLDED))


@_reshapes(torch.reshape, _T.reshape, _T.view)
def reshape(input: Any, *shape: Any) -> Any:
    if shape and isinstance(shape[0], torch.dtype):
        raise Unsupported("view as another dtype")
    return reshaped(input, resolved(input.shape, sizes_of(shape)))


def resolved(shape: torch.Size, sizes: list[int]) -> list[int]:
    """``sizes`` with -1 replaced by the size it stands for."""
    known = prod(size for size in sizes if size != -1)
    return [shape.numel() // max(known, 1) if size == -1 else int(size) for size in sizes]


@_reshapes(_T.view_as, _T.reshape_as)
def view_as(input: Any, other: Tensor) -> Any:
    if not isinstance(input, Tile):  # a plain tensor in the shape of a tile: the global shape
        return input.view(other.shape)
    return reshaped(input, list(other.shape))


@_reshapes(torch.flatten, _T.flatten)
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.ndim, end_dim % input.ndim
    shape = list(input.shape)
    return reshaped(input, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@_reshapes(torch.unflatten, _T.unflatten)
def unflatten(input: Any, dim: int, sizes: Any) -> Any:
    shape, dim = list(input.shape), dim % input.ndim
    inner = resolved(torch.Size([shape[dim]]), list(sizes))
    return reshaped(input, [*shape[:dim], *inner, *shape[dim + 1 :]])


@handles(_T.expand)
def expand(input: Any, *shape: Any) -> Any:
    sizes = sizes_of(shape)
    if not isinstance(input, Tile):  # a plain tensor expanded to the shape of a tile: the global shape
        return input.expand(sizes)
    for _, cut in cut_axes(input.cuts):
        if sizes[cut.dim] not in (-1, input.shape[cut.dim]):
            raise Unsupported(f"dimension {cut.dim} is split")
        sizes[cut.dim] = -1
    return Tile.make(local_of(input).expand(sizes), input.mesh, input.cuts)


@handles(_T.expand_as)
def expand_as(input: Any, other: Tensor) -> Any:
    return expand(input, other.shape)


def _scaled(cuts: Cuts, factor: int) -> Cuts:
    """Each pixel becomes ``factor`` pixels of the same owner."""

    def scaled(split: Split) -> Split:
        before, after = split.margin
        return Split(tuple(b * factor for b in split.bounds), (before * factor, after * factor))

    return tuple(None if cut is None else Cut(cut.dim, scaled(cut.split)) for cut in cuts)


@handles(torch.nn.functional.pixel_shuffle)
def pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    r, local = upscale_factor, local_of(input)
    if any(cut.dim < -2 for _, cut in cut_axes(input.cuts)):
        raise Unsupported("its channels are split")
    *lead, channels, height, width = local.shape
    split = local.reshape(*lead, channels // (r * r), r, r, height, width)
    order = [*range(split.ndim - 4), -2, -4, -1, -3]
    shuffled = split.permute(order).reshape(*lead, channels // (r * r), height * r, width * r)
    return Tile.make(shuffled, input.mesh, _scaled(input.cuts, r))


@handles(torch.nn.functional.pixel_unshuffle)
def pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    """Cut between blocks of ``downscale_factor`` pixels first: each block becomes channels of one pixel."""
    r = downscale_factor
    targets, cuts = {}, list(input.cuts)
    for axis, cut in cut_axes(input.cuts):
        *inner, size = cut.split.bounds
        blocks = Split((*(bound // r for bound in inner), size // r))
        if size % r or cut.dim < -2:
            raise Unsupported("no whole blocks")
        targets[axis] = Split(tuple(bound * r for bound in blocks.bounds))
        cuts[axis] = Cut(cut.dim, blocks)
    local = local_of(recut(input, targets))
    if local.numel() == 0:
        *lead, channels, height, width = local.shape
        return Tile.make(
            local.reshape(*lead, channels * r * r, height // r, width // r), input.mesh, tuple(cuts)
        )
    return Tile.make(torch.nn.functional.pixel_unshuffle(local, r), input.mesh, tuple(cuts))


# -- padding, cropping and slicing: fetches of other runs of pixels, without arithmetic ----------------------


@handles(F.pad)
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Border tiles take the padding; a circular one comes from the other end of the image.

    A margin that a tile holds stays, as far as it needs no pixels of other tiles.
    """
    assert isinstance(input, Tile)
    if mode not in ("constant", "reflect", "replicate", "circular") or (mode != "constant" and value):
        raise Unsupported(f"mode {mode!r} with value {value}")
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
        if mode != "constant" and min(before, after) < 0:
            raise Unsupported(f"{mode} padding {(before, after)}")
        if size + before + after < 0:
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
        raise Unsupported("the index is split")
    entries = explicit(index, tile.ndim)
    local_index: list[Any] = []
    crops: dict[int, tuple[int, int]] = {}
    dims: dict[int, int] = {}
    position = kept = 0
    whole = tile
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
                one = _cropped(whole, {position - tile.ndim: (-at, at + 1 - tile.shape[position])})
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
    return pad(tile, [amount for pair in amounts for amount in pair])


def _strided(tile: Tile, axis: int, pixels: range) -> Tile:
    """``pixels`` along ``axis``: each stays with its owner, so nothing is sent."""
    cut = tile.cuts[axis]
    assert cut is not None
    window = Window(1, pixels.step, before=-pixels.start)
    split = window.split(cut.split, len(pixels))
    split = split.with_margin(spare_margin(window, cut.split, split))
    part = tile.mesh.coord[axis]
    chosen, start = pixels[slice(*split.held(part))], cut.split.held(part)[0]
    own = slice(chosen.start - start, chosen.stop - start, chosen.step) if chosen else slice(0, 0)
    index = (..., own, *((slice(None),) * (-1 - cut.dim)))
    local = local_of(tile)[index]
    cuts = tuple(Cut(cut.dim, split) if a == axis else other for a, other in enumerate(tile.cuts))
    return Tile.make(local, tile.mesh, cuts)


def explicit(index: Any, ndim: int) -> tuple:
    """The index with ``...`` expanded, one entry per dimension."""
    entries = index if isinstance(index, tuple) else (index,)
    for e in entries:
        forward = isinstance(e, slice) and (e.step is None or e.step > 0)
        if not (type(e) is int or forward or e is None or e is Ellipsis):
            raise Unsupported("only ints, slices, None and ... may index")
    named = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    missing = (slice(None),) * (ndim - named)
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        return (*entries[:at], *missing, *entries[at + 1 :])
    return (*entries, *missing)
