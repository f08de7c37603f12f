"""Reshapes of tiles: dimensions merged into one (tokens, windows) stay cut, without sending pixels.

A `Folded` tile shows fewer dimensions than its ``base``, an ordinary tile: ``counts[i]`` dimensions of the
base are merged into dimension ``i``. The rows of a merged dimension that a rank holds are no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.intervals import Split
from commsched.spatial.layout import recut, replicate, trimmed
from commsched.spatial.tile import MOVES, NATIVE, ON_LOCAL, Cut, Tile, cut_axes, local_of, tree_map

ON_FOLDED: dict[Any, Callable[..., Any]] = {}
"""Handlers that also act on folded tiles."""


class Folded(Tile):
    """A tile with merged dimensions. Functions that `commsched.spatial.ops.folds` does not know gather it."""

    base: Tile
    counts: tuple[int, ...]
    _whole: Tile | None = None
    run: Callable[[Any, tuple, dict], Any]  # set by `commsched.spatial.ops.folds`

    @staticmethod
    def of(local: Tensor, base: Tile, counts: tuple[int, ...]) -> Folded:
        shape, place = [], 0
        for count in counts:
            shape.append(prod(base.shape[place : place + count]))
            place += count
        folded: Folded = torch.Tensor._make_wrapper_subclass(
            Folded, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        folded.local, folded.mesh, folded.cuts, folded.base, folded.counts = (
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
        """The gathered tensor, kept for the next function that needs it."""
        if self._whole is None:
            gathered = replicate(self.base)
            self._whole = Tile.make(gathered.local.reshape(tuple(self.shape)), self.mesh, gathered.cuts)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NATIVE or func in ON_LOCAL:
            return super().__torch_function__(func, types, args, kwargs)
        return Folded.run(func, args, kwargs or {})


def unfolded(tile: Tile) -> Tile:
    return tile.base if isinstance(tile, Folded) else tile


def counts_of(tile: Tensor) -> tuple[int, ...]:
    return tile.counts if isinstance(tile, Folded) else (1,) * tile.ndim


def gathered_tiles(tree: Any) -> Any:
    """``tree`` with its folded tiles gathered."""
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
            axis, size = axis_of.get(dim), base.local.shape[dim]
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
    border pixels are fetched. Where the new shape does not follow the cuts, the whole is gathered.
    """
    base = trimmed(unfolded(tile))
    found = _factored(base, sizes)
    if found is None:
        whole = gathered(tile)
        return Tile.make(whole.local.reshape(tuple(sizes)), whole.mesh, whole.cuts)
    factors, counts, units = found
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
