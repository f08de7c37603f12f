"""Which part of a batch or tensor each rank holds: rows of its micro-batches, and tiles."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from scheduler.ir.layout import Layout, Tiles

# -- rows of a batch: which micro-batch and which replica they belong to -------------------------------------

Range = tuple[int, int]
CONSTANTS = (type(None), bool, int, float, str)
"""Types of what crosses a stage's border beside tensors."""


def border(number: int, rows: int, parts: int) -> int:
    """The first row of part ``number`` of ``rows`` rows; every rank rounds in the same way."""
    return number * rows // parts


def rows_of(tree: Any, what: str) -> int:
    """The first dimension that all tensors of a batch share."""
    found = {leaf.shape[0] if leaf.dim() else None for leaf in tensors(tree)}
    if len(found) != 1 or None in found:
        raise ValueError(
            f"the tensors of {what} must all have the same number of rows (their first dimension), got"
            f" {sorted(map(str, found))}"
        )
    return int(found.pop())  # type: ignore[arg-type]


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):  # as in most batches, every step
        return [leaf for part in tree for leaf in tensors(part)]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def one_for_each_row(tree: Any, rows: int) -> bool:
    """Whether this is a list (of lengths, of texts) with an entry for each row of a batch."""
    return type(tree) in (list, tuple) and len(tree) == rows and not tensors(tree)


def has_row_lists(tree: Any, rows: int) -> bool:
    leaves, _ = tree_flatten(tree, is_leaf=lambda part: one_for_each_row(part, rows))
    return any(one_for_each_row(leaf, rows) for leaf in leaves)


def cut(tree: Any, rows: Range, total: int | None = None) -> Any:
    """The same rows of every tensor, and of every list with an entry for each of the ``total`` rows."""
    total = rows_of(tree, "the batch") if total is None else total

    def part(leaf: Any) -> Any:
        if type(leaf) is tuple and rows != (0, total) and all(isinstance(x, (int, float)) for x in leaf):
            raise ValueError(
                f"the batch has {total} rows, and a tuple of as many numbers, {leaf[:4]}...: pass a list or a"
                " tensor if each row has one of them, a torch.Size if they belong to all rows together"
            )
        is_cut = isinstance(leaf, Tensor) or one_for_each_row(leaf, total)
        return leaf[rows[0] : rows[1]] if is_cut else leaf

    if isinstance(tree, Tensor):
        return part(tree)
    return tree_map(part, tree, is_leaf=lambda leaf: one_for_each_row(leaf, total))


def shape_key(tree: Any) -> Hashable:
    """A key that is equal for two batches whose shapes differ in the number of rows alone."""
    return tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in tensors(tree))


def constants_key(tree: Any) -> int:
    """A number that changes with what a batch has beside tensors and what can cross a stage's border; 0:
    nothing.
    """
    constants = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, CONSTANTS) and leaf is not None]
    return crc32(repr(constants).encode()) if constants else 0


@dataclass(frozen=True)
class Share:
    """The rows of one optimizer step: ``rows`` in ``parts`` micro-batches. ``mine``: those that this rank was
    given; None: all. ``constants``: a key of what the inputs have beside tensors.
    """

    rows: int
    parts: int
    key: Hashable
    mine: tuple[Range, ...] | None = None
    constants: Hashable = 0

    @property
    def passed(self) -> int:
        """The rows of the batch that this rank was given."""
        return self.rows if self.mine is None else size_of(self.mine)

    def _micro(self, index: int) -> Range:
        return border(index, self.rows, self.parts), border(index + 1, self.rows, self.parts)

    def size(self, index: int) -> int:
        """Rows of a micro-batch on all replicas."""
        low, high = self._micro(index)
        return high - low

    def within(self, index: int, replica: int, replicas: int) -> Range:
        """The rows of a micro-batch that a replica holds, counted from the micro-batch's first."""
        return _within(self.size(index), replica, replicas)

    def given(self, index: int, replica: int, replicas: int) -> Range:
        """The same rows, counted in the batch that this rank was given."""
        low, _ = self._micro(index)
        first, last = self.within(index, replica, replicas)
        if self.mine is not None:
            before = size_of(part for part in self.mine if part[1] <= low + first)
            return before, before + last - first
        return low + first, low + last

    def check(self, replicas: int) -> None:
        """Every replica needs a row of every micro-batch."""
        smallest = min(self.size(index) for index in range(self.parts))
        if smallest < replicas:
            raise ValueError(
                f"every replica needs at least 1 row of every micro-batch; {self.rows} rows in {self.parts}"
                f" micro-batches leave {smallest} for {replicas} replicas; use a larger batch or fewer"
                " micro-batches"
            )


def held(rows: int, layout: Layout, stage: int, rank: int) -> tuple[Range, ...]:
    """The rows of a step that a rank of ``stage`` holds, micro-batch by micro-batch."""
    share = Share(rows, layout.microbatches, None)
    replicas = layout.replicas(stage)
    places = [(index, layout.place(stage, rank, index)[0]) for index in layout.computed_by(rank, stage)]
    return tuple(share.given(index, replica, replicas) for index, replica in places)


def size_of(parts: Iterable[Range]) -> int:
    """How many rows these are."""
    return sum(high - low for low, high in parts)


@lru_cache(maxsize=1 << 12)
def _within(size: int, replica: int, replicas: int) -> Range:
    return border(replica, size, replicas), border(replica + 1, size, replicas)


def on_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if type(tree) is tuple:  # the usual case, once for every micro-batch: no walk over a pytree
        return tuple(on_device(part, device) for part in tree)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


# -- parts: a range of rows, and of each dimension that tiles cut --------------------------------------------

# Neighbouring stages may divide rows among different numbers of replicas, and cut samples in different tiles:
# each pair of ranks exchanges what both hold.

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


def check_rows(leaf: Any, rows: int, stage: int) -> None:
    """``ValueError`` for a tensor that stages with different numbers of replicas cannot divide."""
    if isinstance(leaf, Tensor) and (not leaf.dim() or len(leaf) != rows):
        raise ValueError(
            f"stages {stage} and {stage + 1} have different numbers of replicas, which divide the first"
            f" dimension of all that they exchange; this replica has {rows} rows, and a tensor has the shape"
            f" {list(leaf.shape)}: expand it to the rows (x.expand(rows, ...)), cut the model elsewhere, or"
            " give both stages as many replicas"
        )


def piece_of(leaf: Any, piece: Piece) -> Any:
    """A view of a tensor; what is no tensor belongs to every part."""
    for dim, low, high in piece if isinstance(leaf, Tensor) else ():
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
