"""Interpolation: along each dimension an output is a weighted sum of a few pixels, fetched and then weighed
locally."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Run, Split
from commsched.spatial.layout import take
from commsched.spatial.ops.windows import each
from commsched.spatial.tile import Cut, Tile, cut_axes, handles, local_of

_LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3}


@dataclass(frozen=True)
class Taps:
    """For each output along one dimension: the pixels it reads (a column per tap) and their weights (None:
    1)."""

    index: Tensor
    weight: Tensor | None


@handles(F.interpolate)
def interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """nearest, nearest-exact, linear, bilinear, trilinear, bicubic and area."""
    n = input.ndim - 2
    sizes, scales = _sizes(input, n, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{n}d")(input, tuple(sizes))
    if mode in _LINEAR and _LINEAR[mode] != n or mode == "bicubic" and n != 2:
        raise ValueError(
            f"{input.mesh.where('interpolate')}: mode {mode!r} does not fit a tensor of {input.ndim} "
            f"dimensions"
        )
    tile, work_type = input, torch.float64 if input.dtype == torch.float64 else torch.float32
    for dim in range(-n, 0):
        one = (mode, input.shape[dim], sizes[dim], scales[dim], bool(align_corners), work_type)
        taps = _smooth_taps(*one) if antialias else _taps(*one)
        if (
            mode in ("nearest", "nearest-exact")
            or sizes[dim] != input.shape[dim]
            or scales[dim] not in (None, 1.0)
        ):
            tile = _resample(tile, dim, taps, input.dtype)
    return tile


def _sizes(
    input: Any, n: int, size: Any, scale: Any, recompute: bool | None
) -> tuple[list[int], list[float | None]]:
    """Output sizes, and the scale factors where torch uses them instead of the ratio of sizes."""
    if size is not None:
        return list(each(size, n)), [None] * n
    factors = [float(scale)] * n if isinstance(scale, (int, float)) else [float(s) for s in scale]
    sizes = [math.floor(pixels * factor) for pixels, factor in zip(input.shape[-n:], factors)]
    return sizes, [None] * n if recompute else list(factors)


def _taps(mode: str, size: int, out: int, scale: float | None, align: bool, dtype: torch.dtype) -> Taps:
    if mode in ("nearest", "nearest-exact"):  # torch itself says which pixel
        pixels = torch.arange(size, dtype=dtype).view(1, 1, size)
        options = {"size": out} if scale is None else {"scale_factor": scale}
        return Taps(F.interpolate(pixels, mode=mode, **options).view(-1, 1).long(), None)
    ratio = torch.tensor(_ratio(size, out, scale, align), dtype=dtype)
    position = torch.arange(out, dtype=dtype)
    source = position * ratio if align else (position + 0.5) * ratio - 0.5
    return _cubic(source, size) if mode == "bicubic" else _linear(source, size)


def _ratio(size: int, out: int, scale: float | None, align: bool) -> float:
    """How many pixels of the input a pixel of the result is wide."""
    if align:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return size / out if scale is None else 1.0 / scale


def _linear(source: Tensor, size: int) -> Taps:
    source = source.clamp(min=0)
    low = source.floor().long().clamp(max=size - 1)
    fraction = (source - low).clamp(0, 1)
    return Taps(
        torch.stack([low, (low + 1).clamp(max=size - 1)], 1), torch.stack([1 - fraction, fraction], 1)
    )


def _cubic(source: Tensor, size: int) -> Taps:
    low = source.floor()
    t, a = source - low, -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    weight = torch.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)
    index = low.long().unsqueeze(1) + torch.arange(-1, 3)
    return Taps(index.clamp(0, size - 1), weight)


def _smooth_taps(
    mode: str, size: int, out: int, scale: float | None, align: bool, dtype: torch.dtype
) -> Taps:
    """With ``antialias=True``: a triangle or cubic filter as wide as the pixels of the result."""
    ratio = _ratio(size, out, scale, align)
    stretch, reach = max(ratio, 1.0), 2 if mode == "bicubic" else 1
    center = (torch.arange(out, dtype=dtype) + 0.5) * torch.tensor(ratio, dtype=dtype)
    first = (center - reach * stretch + 0.5).long().clamp(min=0)
    last = (center + reach * stretch + 0.5).long().clamp(max=size)
    index = first.unsqueeze(1) + torch.arange(int((last - first).max()))
    x = ((index + 0.5 - center.unsqueeze(1)) / stretch).abs()
    if mode == "bicubic":
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weight = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    else:
        weight = (1 - x).clamp(min=0)
    weight = weight * (index < last.unsqueeze(1))
    return Taps(torch.minimum(index, last.unsqueeze(1) - 1), weight / weight.sum(1, keepdim=True))


def _resample(tile: Tile, dim: int, taps: Taps, dtype: torch.dtype) -> Tile:
    axis = next((a for a, cut in cut_axes(tile.cuts) if cut.dim == dim), None)
    cuts, index, weight = tile.cuts, taps.index, taps.weight
    if axis is None:
        buffer = local_of(tile)
    else:
        cut = tile.cuts[axis]
        assert cut is not None
        split = _with_spare_margin(_follow(cut.split, taps), cut.split, index)
        spans = [_span(index[slice(*split.held(part))]) for part in range(split.parts)]
        buffer = take(tile, {axis: tuple((Run(*span),) if span[0] < span[1] else () for span in spans)})
        own = tile.mesh.coord[axis]
        rows = slice(*split.held(own))
        index, weight = index[rows] - spans[own][0], None if weight is None else weight[rows]
        cuts = tuple(Cut(dim, split) if a == axis else c for a, c in enumerate(cuts))
    return Tile.make(_weighted(buffer, dim, index, weight, dtype), tile.mesh, cuts)


def _follow(source: Split, taps: Taps) -> Split:
    """Each output belongs to the owner of its heaviest tap, the nearest pixel."""
    index, weight = taps.index, taps.weight
    middle = (index if weight is None else index.gather(1, weight.argmax(1, keepdim=True)))[:, 0]
    inner = torch.searchsorted(middle.contiguous(), torch.tensor(source.bounds[1:-1], dtype=middle.dtype))
    return Split((0, *inner.tolist(), len(middle)))


def _with_spare_margin(split: Split, source: Split, index: Tensor) -> Split:
    """``split`` with the margin of outputs that every part can compute from the margin that it holds."""
    if source.margin == (0, 0):
        return split
    lowest, highest = index.amin(1), index.amax(1)
    before = after = split.size
    for part in range(split.parts):
        (lo, hi), (start, stop) = split.owned(part), source.held(part)
        first = int(torch.searchsorted(lowest, start))
        last = int(torch.searchsorted(highest, stop))
        if lo < hi:
            before = min(before, lo - first if start > 0 else split.size)
            after = min(after, last - hi if stop < source.size else split.size)
    return split if min(before, after) < 0 else split.with_margin((before, after))


def _span(index: Tensor) -> tuple[int, int]:
    return (0, 0) if index.numel() == 0 else (int(index.min()), int(index.max()) + 1)


def _weighted(buffer: Tensor, dim: int, index: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    index = index.to(buffer.device)
    if weight is None:
        return buffer.index_select(dim, index[:, 0])
    weight = weight.to(buffer.device, dtype)
    shape = (-1, *(1,) * (-1 - dim))
    taps = range(index.shape[1])
    parts = [buffer.index_select(dim, index[:, k]) * weight[:, k].view(shape) for k in taps]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
