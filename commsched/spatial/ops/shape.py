"""Concatenating, permuting and reshaping."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.intervals import Run, Split, Want
from commsched.spatial.layout import common_cuts, enter, fit, replicate, take, trimmed
from commsched.spatial.tile import Cut, Cuts, Tile, cut_axes, handles, tiles_in, unsupported

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
    if len(tiles) != len(tensors) or any(t.cuts[axis] is None for t in tiles):
        return unsupported(torch.cat, (tensors, dim), {}, f"dimension {dim} is split in some operands only")
    return _cat_split([trimmed(t) for t in tiles], axis, dim)


def _cat_split(tiles: list[Tile], axis: int, dim: int) -> Tile:
    mesh, size = tiles[0].mesh, sum(tile.shape[dim] for tile in tiles)
    split = Split(tuple(i * size // mesh.grid[axis] for i in range(mesh.grid[axis] + 1)))
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


@handles(torch.permute, _T.permute)
def permute(input: Any, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    order = [d % input.ndim for d in order]
    cuts = tuple(
        None if cut is None else Cut(order.index(cut.dim + input.ndim) - input.ndim, cut.split)
        for cut in input.cuts
    )
    return Tile.make(enter(input, input.mesh, input.cuts).permute(order), input.mesh, cuts)


@handles(torch.transpose, _T.transpose, torch.swapaxes, _T.swapaxes, torch.swapdims, _T.swapdims)
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(input, order)


@handles(torch.movedim, _T.movedim, torch.moveaxis, _T.moveaxis)
def movedim(input: Any, source: Any, destination: Any) -> Any:
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    n = input.ndim
    placed = {t % n: s % n for s, t in zip(sources, targets)}
    rest = iter(d for d in range(n) if d not in placed.values())
    return permute(input, [placed[i] if i in placed else next(rest) for i in range(n)])


@handles(torch.reshape, _T.reshape, _T.view)
def reshape(input: Any, *shape: Any) -> Any:
    """With the split dimensions and all after them unchanged, locally; else the whole image is gathered
    first."""
    if shape and isinstance(shape[0], torch.dtype):
        return unsupported(_T.view, (input, *shape), {}, "view as another dtype")
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _reshape(input, resolved(input.shape, list(sizes)))


def _reshape(input: Tile, sizes: list[int]) -> Tile:
    tail = -min(cut.dim for _, cut in cut_axes(input.cuts))
    if len(sizes) < tail or sizes[-tail:] != list(input.shape[-tail:]):
        whole = replicate(input)
        return Tile.make(whole.local.reshape(sizes), whole.mesh, whole.cuts)
    local = enter(input, input.mesh, input.cuts)
    return Tile.make(local.reshape(sizes[:-tail] + list(local.shape[-tail:])), input.mesh, input.cuts)


def resolved(shape: torch.Size, sizes: list[int]) -> list[int]:
    """``sizes`` with -1 replaced by the size it stands for."""
    known = prod(size for size in sizes if size != -1)
    return [shape.numel() // max(known, 1) if size == -1 else int(size) for size in sizes]


@handles(_T.view_as, _T.reshape_as)
def view_as(input: Any, other: Tensor) -> Any:
    return _reshape(input, list(other.shape))


@handles(torch.flatten, _T.flatten)
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % input.ndim, end_dim % input.ndim
    shape = list(input.shape)
    return _reshape(input, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@handles(torch.unflatten, _T.unflatten)
def unflatten(input: Any, dim: int, sizes: Any) -> Any:
    shape, dim = list(input.shape), dim % input.ndim
    inner = resolved(torch.Size([shape[dim]]), list(sizes))
    return _reshape(input, [*shape[:dim], *inner, *shape[dim + 1 :]])


@handles(_T.expand)
def expand(input: Any, *shape: Any) -> Any:
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    return _expand(input, sizes)


@handles(_T.expand_as)
def expand_as(input: Any, other: Tensor) -> Any:
    return _expand(input, list(other.shape))


def _expand(input: Any, sizes: list[int]) -> Any:
    if not isinstance(input, Tile):  # a plain tensor expanded to the shape of a tile: the global shape
        return input.expand(sizes)
    for _, cut in cut_axes(input.cuts):
        if sizes[cut.dim] not in (-1, input.shape[cut.dim]):
            return unsupported(_T.expand, (input, sizes), {}, f"dimension {cut.dim} is split")
        sizes[cut.dim] = -1
    return Tile.make(enter(input, input.mesh, input.cuts).expand(sizes), input.mesh, input.cuts)


def _scaled(cuts: Cuts, factor: int) -> Cuts:
    return tuple(
        None if cut is None else Cut(cut.dim, Split(tuple(b * factor for b in cut.split.bounds)))
        for cut in cuts
    )


@handles(torch.nn.functional.pixel_shuffle)
def pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    tile = trimmed(input)
    r, local = upscale_factor, enter(tile, tile.mesh, tile.cuts)
    *lead, channels, height, width = local.shape
    split = local.reshape(*lead, channels // (r * r), r, r, height, width)
    order = [*range(split.ndim - 4), -2, -4, -1, -3]
    shuffled = split.permute(order).reshape(*lead, channels // (r * r), height * r, width * r)
    return Tile.make(shuffled, tile.mesh, _scaled(tile.cuts, r))
