"""Which part of a tensor each rank of a stage holds: a range of rows, and of each dimension that tiles cut.

Neighbouring stages may divide rows among different numbers of replicas, and cut samples in different tiles:
each pair of ranks exchanges what both hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commsched.pipeline.rows import Range
from scheduler.ir.layout import Tiles

Cut = tuple[tuple[int, tuple[int, ...]] | None, ...]
"""How a grid cuts a tensor: by axis of the grid the dimension (counted from the end) and the borders of the
parts; None where every part holds all."""
Cuts = tuple["Cut | None", "Cut | None"]
"""How a tensor is cut on the two sides of a stage's border: on this side, and on the other."""
Part = dict[int, Range]
"""Intervals by dimension; dimension 0 are the rows of a micro-batch."""
Piece = tuple[tuple[int, int, int], ...]
"""A part of a tensor: dimension, start and stop of each ``narrow``. Empty: the whole tensor."""

UNCUT: Cuts = (None, None)


def entering(leaf: Any, cut: Cut | None, before: Tiles | None, after: Tiles | None) -> Cut | None:
    """How a tensor that is cut by ``before`` as ``cut`` says is cut in the next stage: the same way where the
    grid is the same, else in even tiles.
    """
    if after is None or not isinstance(leaf, Tensor):
        return None
    if before == after:
        return cut
    sizes = {dim: leaf.shape[dim] for dim in after.dims if leaf.dim() >= -dim}
    sizes |= {axis[0]: axis[1][-1] for axis in cut or () if axis is not None}
    if len(sizes) < len(after.dims):
        raise ValueError(
            f"a tensor of shape {list(leaf.shape)} enters a stage on a grid of {after.grid} tiles, and has no"
            f" dimensions {after.dims} to cut"
        )
    return _even(sizes, after)


def _even(sizes: Mapping[int, int], tiles: Tiles) -> Cut:
    from commsched.spatial.intervals import Split  # only where a stage is on tiles

    return tuple(
        (dim, Split.even(sizes[dim], parts).bounds) if parts > 1 else None
        for dim, parts in zip(tiles.dims, tiles.grid, strict=True)
    )


def part_of(rows: Range, coord: Sequence[int], cuts: Cuts) -> Part:
    """The part of the tile at ``coord`` of this side's grid, in all dimensions that either side cuts."""
    found, (mine, other) = {0: rows}, cuts
    for axis in other or ():
        if axis is not None:
            found[axis[0]] = 0, axis[1][-1]
    for axis, place in zip(mine or (), coord):
        if axis is not None:
            found[axis[0]] = axis[1][place], axis[1][place + 1]
    return found


def common(mine: Part, its: Part) -> Piece:
    """The intersection of two parts, counted from where ``mine`` begins."""
    found = []
    for dim, (start, stop) in mine.items():
        low = min(max(start, its[dim][0]), stop)  # an empty piece lies within ``mine``, too
        high = max(low, min(stop, its[dim][1]))
        if (low, high) != (start, stop):
            found.append((dim, low - start, high - start))
    return tuple(found)


def piece_of(leaf: Any, piece: Piece, stage: int) -> Any:
    """A view of a tensor; what is no tensor belongs to every part."""
    if not isinstance(leaf, Tensor):
        return leaf
    for dim, low, high in piece:
        if leaf.dim() == 0 or leaf.shape[dim] < high:
            raise ValueError(
                f"stage {stage} and its neighbour divide a micro-batch among different ranks, so what they"
                f" exchange is cut along dimension {dim}; its size there must be at least {high}, got shape"
                f" {list(leaf.shape)}"
            )
        leaf = leaf.narrow(dim, low, high - low)
    return leaf


def assembled(pieces: Sequence[tuple[Any, Piece]], whole: Part) -> Any:
    """The tensor that these pieces make up; pieces that are None are zeros, unless all are."""
    present = [(leaf, piece) for leaf, piece in pieces if leaf is not None]
    if not present:
        return None
    first, where = present[0]
    if not isinstance(first, Tensor) or (len(pieces) == 1 and not where):
        return first
    shape = list(first.shape)
    for dim in {dim for _, piece in pieces for dim, _, _ in piece}:
        shape[dim] = whole[dim][1] - whole[dim][0]
    make = torch.empty if len(present) == len(pieces) else torch.zeros
    result = make(shape, dtype=first.dtype, device=first.device)
    for tensor, piece in present:
        target = result
        for dim, low, high in piece:
            target = target.narrow(dim, low, high - low)
        target.copy_(tensor)
    return result
