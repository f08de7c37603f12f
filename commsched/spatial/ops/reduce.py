"""Sums and means over split dimensions, global and adaptive pooling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Split, clipped
from commsched.spatial.layout import local_owned, owned_cuts, replicate, take
from commsched.spatial.linear import apply
from commsched.spatial.ops.pointwise import along, moved
from commsched.spatial.replicated import total as total_of_tiles
from commsched.spatial.tile import Cut, Tile, cut_axes, handles, local_of, unsupported


def negative_dims(tile: Tensor, dim: Any) -> list[int]:
    """``dim`` as torch's reductions take it (None and () mean all), counted from the end."""
    if dim is None or dim == () or dim == []:
        return list(range(-tile.ndim, 0))
    chosen = (dim,) if isinstance(dim, int) else tuple(dim)
    return [d if d < 0 else d - tile.ndim for d in chosen]


def wide(kind: torch.dtype) -> torch.dtype:
    """The type in which torch adds up numbers of this type before it rounds the result once."""
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind


@handles(torch.sum, torch.Tensor.sum)
def total(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum over all owned pixels of ``dim``; replicated along the mesh axes that it removes."""
    kind = dtype or input.dtype
    if wide(kind) == kind:
        return unrounded(input, dim, keepdim, dtype)
    return unrounded(input, dim, keepdim, wide(kind)).to(kind)


def unrounded(input: Any, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    """The same sum in the type in which it is added up."""
    dims = negative_dims(input, dim)
    axes = tuple(axis for axis, cut in cut_axes(input.cuts) if cut.dim in dims)
    local = local_owned(input).sum(dims, keepdim=keepdim, dtype=dtype)
    if axes:
        local = apply(total_of_tiles, local, input.mesh, axes, input.mesh.module)
    left = tuple(None if a in axes else c for a, c in enumerate(owned_cuts(input.cuts)))
    return Tile.make(local, input.mesh, left if keepdim else moved(left, dims, -1))


@handles(torch.mean, torch.Tensor.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    count, kind = prod(input.shape[d] for d in negative_dims(input, dim)), dtype or input.dtype
    result = unrounded(input, dim, keepdim, wide(kind)) / count
    return result if result.dtype == kind else result.to(kind)


@handles(torch.norm, torch.Tensor.norm, torch.linalg.vector_norm)
def norm(input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """The 2-norm has gradient zero at zero, as torch has it; other norms are of whole dimensions only."""
    options["p"] = options.pop("ord", p)
    if options["p"] not in (2, "fro", None) or options.get("dtype") is not None:
        return along(torch.Tensor.norm, (input,), {"dim": dim, "keepdim": keepdim, **options})
    kind = input.dtype
    input = input if wide(kind) == kind else input.to(wide(kind))
    squares = total(input * input, dim, keepdim)
    zero = squares == 0
    result = (squares + zero).sqrt().masked_fill(zero, 0.0)
    return result if result.dtype == kind else result.to(kind)


def var(
    input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The variance over all owned pixels of ``dim``, from the deviations of the mean."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    kind, dims = input.dtype, negative_dims(input, dim)
    wider = input.to(wide(kind))
    deviations = wider - mean(wider, dims, keepdim=True)
    freedom = prod(input.shape[d] for d in dims) - (int(unbiased) if correction is None else correction)
    return (unrounded(deviations * deviations, dims, keepdim, None) / max(freedom, 0)).to(kind)


def std(input: Any, *args: Any, **options: Any) -> Any:
    """The root of the variance; its gradient is zero where it is zero, as torch has it."""
    variance = var(input.to(wide(input.dtype)), *args, **options)
    zero = variance == 0
    return (variance + zero).sqrt().masked_fill(zero, 0.0).to(input.dtype)


def _of_split(function: Callable[..., Any], name: str) -> None:
    """Registers a reduction for split dimensions; torch's own runs on the parts where others are reduced."""

    def reduced(original: Any, input: Any, *args: Any, **options: Any) -> Any:
        given = options.get("dim", args[0] if args else None)
        dims = negative_dims(input, None if isinstance(given, bool) else given)
        if any(cut.dim in dims for _, cut in cut_axes(input.cuts)):
            if not input.is_floating_point():
                return unsupported(original, (input, *args), options, "it is for real numbers")
            return function(input, *args, **options)
        return along(original, (input, *args), options)

    for original in (getattr(torch, name), getattr(torch.Tensor, name)):
        handles(original)(partial(reduced, original))


_of_split(var, "var")
_of_split(std, "std")


def _adaptive_windows(size: int, outputs: int) -> list[tuple[int, int]]:
    return [(o * size // outputs, -(-(o + 1) * size // outputs)) for o in range(outputs)]


def _per_window(
    tile: Tile, dim: int, windows: list[tuple[int, int]], combine: Callable[[Tensor], Tensor]
) -> Tile:
    """``combine`` of the pixels of each window along ``dim``, by the owner of the window's middle."""
    axis = next((a for a, cut in cut_axes(tile.cuts) if cut.dim == dim), None)
    cut = None if axis is None else tile.cuts[axis]
    if axis is None or cut is None:
        buffer, cuts = local_of(tile), tile.cuts
    else:
        owners = [cut.split.part_of((lo + hi - 1) // 2) for lo, hi in windows]
        counts = [sum(1 for owner in owners if owner < part) for part in range(cut.split.parts + 1)]
        split = Split((*counts[:-1], len(windows)))
        spans = []
        for part in range(split.parts):
            lo, hi = split.owned(part)
            spans.append((windows[lo][0], windows[hi - 1][1]) if lo < hi else (0, 0))
        buffer = take(tile, {axis: tuple(clipped(lo, hi, cut.split.size) for lo, hi in spans)})
        own = tile.mesh.coord[axis]
        first = spans[own][0]
        windows = [(lo - first, hi - first) for lo, hi in windows[slice(*split.owned(own))]]
        cuts = tuple(Cut(dim, split) if a == axis else c for a, c in enumerate(tile.cuts))
    parts = [combine(buffer.narrow(dim, lo, hi - lo)) for lo, hi in windows]
    return Tile.make(torch.cat(parts, dim) if parts else buffer.narrow(dim, 0, 0), tile.mesh, cuts)


def _adaptive_avg(n: int, input: Any, output_size: Any) -> Any:
    sizes = _sizes(n, input, output_size)
    global_dims = [d for d in range(-n, 0) if sizes[d] == 1]
    if len(global_dims) == n:
        return mean(input, global_dims, keepdim=True)
    tile, kind = input, wide(input.dtype)
    for dim in range(-n, 0):
        if dim in global_dims:
            tile = unrounded(tile, dim, True, kind)
        else:
            windows = _adaptive_windows(input.shape[dim], sizes[dim])
            tile = _per_window(tile, dim, windows, partial(torch.sum, dim=dim, keepdim=True, dtype=kind))
    for dim in range(-n, 0):  # one after the other, as torch divides
        lengths = [hi - lo for lo, hi in _adaptive_windows(input.shape[dim], sizes[dim])]
        tile = tile / torch.tensor(lengths, dtype=tile.dtype, device=tile.device).view(-1, *(1,) * (-1 - dim))
    return tile if tile.dtype == input.dtype else tile.to(input.dtype)


def _adaptive_max(n: int, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Dimension by dimension from the last, so that the first of equal maxima is torch's."""
    if return_indices:
        function = getattr(F, f"adaptive_max_pool{n}d")
        return unsupported(function, (input, output_size), {}, "return_indices=True")
    sizes = _sizes(n, input, output_size)
    tile = input
    for dim in range(-1, -n - 1, -1):
        if sizes[dim] == 1:
            tile = _global_max(tile, dim)
        else:
            windows = _adaptive_windows(input.shape[dim], sizes[dim])
            tile = _per_window(tile, dim, windows, partial(_largest, dim))
    return tile


def _largest(dim: int, part: Tensor) -> Tensor:
    """The maxima along ``dim``; the gradient of equal ones goes to the first (``amax`` divides it)."""
    return part.max(dim, keepdim=True).values


def _global_max(tile: Tile, dim: int) -> Tile:
    """The maximum of the parts' maxima."""
    axis = next((a for a, cut in cut_axes(tile.cuts) if cut.dim == dim), None)
    local = local_owned(tile)
    if axis is not None:
        if local.shape[dim] == 0:
            local = F.pad(local, [0, 0] * (-1 - dim) + [0, 1], value=-float("inf"))
        best = local.max(dim, keepdim=True).values
        one_each = Split(tuple(range(tile.mesh.grid[axis] + 1)))
        cuts = tuple(Cut(dim, one_each) if a == axis else c for a, c in enumerate(owned_cuts(tile.cuts)))
        tile = replicate(Tile.make(best, tile.mesh, cuts), (axis,))
        local = tile.local
    return Tile.make(local.max(dim, keepdim=True).values, tile.mesh, owned_cuts(tile.cuts))


def _sizes(n: int, input: Any, output_size: Any) -> list[int]:
    values = [output_size] if output_size is None or isinstance(output_size, int) else list(output_size)
    values = values * n if len(values) == 1 else values
    return [int(size if value is None else value) for value, size in zip(values, input.shape[-n:])]


for _n in (1, 2, 3):
    handles(getattr(F, f"adaptive_avg_pool{_n}d"))(partial(_adaptive_avg, _n))
    handles(getattr(F, f"adaptive_max_pool{_n}d"))(partial(_adaptive_max, _n))
