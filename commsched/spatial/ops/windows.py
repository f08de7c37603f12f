"""Operations whose outputs read a window of pixels: convolution, pooling and interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.fetch import Division, ExchangePlan, Halo, compact, fetch, overlapped
from commsched.spatial.intervals import Run, Split, TransposedWindow, Window, clipped, spare_margin
from commsched.spatial.layout import parameters, plan_for, take
from commsched.spatial.ops.reduce import wide
from commsched.spatial.tile import Cut, Cuts, Tile, Unsupported, cut_axes, handles, image_of, local_of

# -- the buffer with every pixel that the outputs of a rank's part read --------------------------------------

AnyWindow = Window | TransposedWindow


def each(value: Any, n: int) -> tuple[int, ...]:
    """An int or a sequence of one or ``n`` ints as ``n`` ints."""
    if isinstance(value, int):
        return (value,) * n
    values = tuple(int(v) for v in value)
    return values * n if len(values) == 1 else values


def _check_image(value: Any, n: int) -> None:
    """Only the last ``n`` dimensions may be split."""
    for _, cut in cut_axes(image_of(value).cuts):
        if cut.dim < -n:
            raise Unsupported(f"dimension {cut.dim} is split, and only the last {n} are of the image")


def planned(tile: Tile, windows: Sequence[AnyWindow], ceil: bool = False) -> tuple[Cuts, ExchangePlan]:
    """The owners of the outputs, and the exchange after which each part has every pixel that its outputs
    read, with fill beyond the border. ``windows``: of the last dimensions.
    """
    cuts, wants = list(tile.cuts), {}
    for axis, cut in cut_axes(tile.cuts):
        window, ceiling = windows[cut.dim], {"ceil": ceil} if ceil else {}
        size = window.outputs(cut.split.size, **ceiling)
        if size < 1:
            raise ValueError(
                f"{tile.mesh.where('window')}: a kernel of {window.span} pixels does not fit an image of "
                f"{cut.split.size} pixels along dimension {cut.dim}"
            )
        split = window.split(cut.split, size)
        split = split.with_margin(spare_margin(window, cut.split, split))
        cuts[axis] = Cut(cut.dim, split)
        needs = (window.need(*split.held(part)) for part in range(split.parts))
        wants[axis] = tuple(clipped(lo, hi, cut.split.size) for lo, hi in needs)
    return tuple(cuts), plan_for(tile.mesh, tile.cuts, wants)


def _count_work(tile: Tile, windows: Sequence[AnyWindow], cuts: Cuts, work: int, hiding: int = 0) -> None:
    """Count a dry run's multiplications: ``work`` an output pixel, and all that are done beside a halo."""
    if not tile.mesh.dry:
        return
    sizes = {dim: windows[dim].outputs(tile.shape[dim]) for dim in range(-len(windows), 0)}
    sizes |= {cut.dim: len(range(*part_of(cut, tile, axis))) for axis, cut in cut_axes(cuts)}
    tile.mesh.work += work * prod(sizes.values()) * (tile.shape[0] if tile.ndim > 1 else 1)
    tile.mesh.hiding += hiding


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
    cuts, plan = planned(tile, windows, ceil)
    division = _division(tile, windows, cuts) if plan.remote else None
    interior = 0 if division is None else work * division.interior_pixels(local)
    overlaps = division is not None and mesh.overlaps(interior)
    _count_work(tile, windows, cuts, work, interior if overlaps else 0)
    if division is not None and overlaps:
        return Tile.make(
            overlapped(local, Halo(plan, mesh, fill, mesh.module), division, compute), mesh, cuts
        )
    received: list[Tensor] = []
    buffer = fetch(local, plan, mesh, fill, received)
    with compact(buffer, local, plan, fill, received):
        result = compute(at_least(buffer, {cut.dim: windows[cut.dim].span for _, cut in cut_axes(cuts)}))
    empty = [cut.dim for axis, cut in cut_axes(cuts) if len(range(*part_of(cut, tile, axis))) == 0]
    return Tile.make(without(result, empty), mesh, cuts)


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
    for dim in dims:
        result = result.narrow(dim, 0, 0)
    return result


def part_of(cut: Cut, tile: Tile, axis: int) -> tuple[int, int]:
    return cut.split.held(tile.mesh.coord[axis])


def _windows(n: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> list[Window]:
    kernel = each(kernel, n)
    stride = kernel if stride is None or stride == [] else each(stride, n)
    return [Window(k, s, d, p, p) for k, s, p, d in zip(kernel, stride, each(padding, n), each(dilation, n))]


def _rest(tile: Tile, windows: list[Window]) -> list[int]:
    """The padding that torch applies: that of dimensions that are not split."""
    rest = [window.before for window in windows]
    for _, cut in cut_axes(tile.cuts):
        rest[cut.dim] = 0
    return rest


# -- convolutions and transposed convolutions ----------------------------------------------------------------

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _paddings(padding: Any, n: int, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Padding before and after, per dimension; ``'same'`` puts the odd pixel after."""
    if padding == "valid":
        return [(0, 0)] * n
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in each(padding, n)]


def _convolve(
    n: int,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    _check_image(input, n)
    kernel, stride, dilation = weight.shape[2:], each(stride, n), each(dilation, n)
    pads = _paddings(padding, n, kernel, dilation)
    windows = [Window(k, s, d, *p) for k, s, d, p in zip(kernel, stride, dilation, pads)]
    for _, cut in cut_axes(input.cuts):
        pads[cut.dim] = (0, 0)  # it is in the buffer
    uneven = [p for pair in reversed(pads) for p in pair] if any(a != b for a, b in pads) else None
    rest = [0 if uneven else before for before, _ in pads]
    weight, bias = parameters(input, weight, bias)

    def compute(buffer: Tensor) -> Tensor:
        padded = F.pad(buffer, uneven) if uneven else buffer
        return _CONV[n](padded, weight, bias, stride, rest, dilation, groups)

    return windowed(input, windows, False, 0.0, compute, work=weight.numel())


def _convolve_transposed(
    n: int,
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    _check_image(input, n)
    per_dim = zip(
        weight.shape[2:], each(stride, n), each(dilation, n), each(padding, n), each(output_padding, n)
    )
    windows = [TransposedWindow(k, s, d, p, p, extra) for k, s, d, p, extra in per_dim]
    weight, bias = parameters(input, weight, bias)
    cuts, plan = planned(input, windows)
    tile = local_of(input)
    received: list[Tensor] = []
    _count_work(input, windows, cuts, weight.numel())
    fetched = buffer = fetch(tile, plan, input.mesh, 0.0, received)
    unreached = [cut.dim for _, cut in cut_axes(cuts) if buffer.shape[cut.dim] == 0]  # no input writes there
    buffer = at_least(buffer, dict.fromkeys(unreached, 1))
    # Padding and output padding along cut dimensions are a crop (or zeros) of the full result.
    pads, extras, crop = list(each(padding, n)), list(each(output_padding, n)), [(0, 0)] * n
    for axis, cut in cut_axes(cuts):
        lo, hi = part_of(cut, input, axis)
        window = windows[cut.dim]
        start = window.need(lo, hi)[0] * window.stride - window.before
        full = (buffer.shape[cut.dim] - 1) * window.stride + window.span
        pads[cut.dim], extras[cut.dim] = 0, 0
        crop[cut.dim] = (0, hi - lo) if cut.dim in unreached else (start - lo, hi - start - full)
    with compact(fetched, tile, plan, 0.0, received):
        local = _TRANSPOSED[n](buffer, weight, None, each(stride, n), pads, extras, groups, each(dilation, n))
    local = F.pad(without(local, unreached), [c for pair in reversed(crop) for c in pair])
    if bias is not None:
        local = local + bias.to(local.dtype).view(-1, *(1,) * n)  # under autocast the kernel's type
    return Tile.make(local, input.mesh, cuts)


for _n in (1, 2, 3):
    handles(_CONV[_n])(partial(_convolve, _n))
    handles(_TRANSPOSED[_n])(partial(_convolve_transposed, _n))


@handles(F.unfold)
def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """Columns of patches; each stays with the rank that owns its middle."""
    _check_image(input, 2)
    kernel, dilation, stride = each(kernel_size, 2), each(dilation, 2), each(stride, 2)
    windows = _windows(2, kernel, stride, padding, dilation)
    rest = _rest(input, windows)

    def compute(buffer: Tensor) -> Tensor:
        sizes = [w.outputs(n + 2 * p - w.before - w.after)
                 for w, n, p in zip(windows, buffer.shape[-2:], rest)]  # fmt: skip
        columns = F.unfold(buffer, kernel, dilation, tuple(rest), stride)
        return columns.reshape(*columns.shape[:-1], *sizes)

    patches = windowed(input, windows, False, 0.0, compute, work=kernel[0] * kernel[1] * input.shape[1])
    return patches.flatten(-2)


# -- pooling -------------------------------------------------------------------------------------------------

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _max_pool(
    n: int,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:
        raise Unsupported("return_indices=True")
    _check_image(input, n)
    windows = _windows(n, kernel_size, stride, padding, dilation)
    lowest = -float("inf") if input.is_floating_point() else torch.iinfo(input.dtype).min
    sizes, strides, steps = zip(*((w.kernel, w.stride, w.dilation) for w in windows))
    rest = _rest(input, windows)

    def compute(buffer: Tensor) -> Tensor:
        return _MAX[n](buffer, sizes, strides, rest, steps, ceil_mode=ceil_mode)

    return windowed(input, windows, ceil_mode, lowest, compute, work=prod(sizes) * input.shape[1])


def _avg_pool(
    n: int,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    _check_image(input, n)
    windows = _windows(n, kernel_size, stride, padding)
    rest = _rest(input, windows)
    work = prod(w.kernel for w in windows) * input.shape[1]
    sums = windowed(
        input, windows, ceil_mode, 0.0, lambda b: _window_sums(n, b, windows, rest, ceil_mode), work
    )
    local, cuts = sums.held, sums.cuts
    if divisor_override is not None:
        return Tile.make((local / divisor_override).to(input.dtype), input.mesh, cuts)
    counts = torch.ones((), dtype=local.dtype, device=local.device)
    ranges = {cut.dim: part_of(cut, input, axis) for axis, cut in cut_axes(cuts)}
    for dim in range(-n, 0):
        lo, hi = ranges.get(dim, (0, local.shape[dim]))
        per_window = [_counted(windows[dim], o, input.shape[dim], count_include_pad) for o in range(lo, hi)]
        counts = counts.unsqueeze(-1) * torch.tensor(per_window, dtype=local.dtype, device=local.device)
    return Tile.make((local / counts).to(input.dtype), input.mesh, cuts)


def _counted(window: Window, output: int, size: int, include_pad: bool) -> int:
    """Pixels by which output ``output`` divides: its window inside the image, with its padding if asked."""
    lo, hi = window.need(output, output + 1)
    if include_pad:
        return min(hi, size + window.after) - lo
    return min(hi, size) - max(lo, 0)


def _window_sums(n: int, buffer: Tensor, windows: list[Window], rest: list[int], ceil: bool) -> Tensor:
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    buffer = buffer.to(wide(buffer.dtype))  # the sum may be too large for float16 where the mean is not
    if n == 1:
        sums = F.avg_pool2d(
            buffer.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *rest), ceil, divisor_override=1
        )
        return sums.squeeze(-2)
    pool = F.avg_pool2d if n == 2 else F.avg_pool3d
    return pool(buffer, kernel, stride, rest, ceil, divisor_override=1)


for _n in (1, 2, 3):
    handles(_MAX[_n], getattr(torch, f"max_pool{_n}d"))(partial(_max_pool, _n))
    handles(getattr(F, f"avg_pool{_n}d"))(partial(_avg_pool, _n))


# -- interpolation -------------------------------------------------------------------------------------------

# Along each dimension an output is a weighted sum of a few pixels, fetched and then weighed locally.

_SMOOTH = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}  # image dimensions


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
    n, smooth = input.ndim - 2, mode in _SMOOTH
    if (
        _SMOOTH.get(mode, n) != n
        or mode not in (*_SMOOTH, "nearest", "nearest-exact", "area")
        or (size is None) == (scale_factor is None)
        or (recompute_scale_factor and size is not None)
        or (align_corners is not None and not smooth)
        or (antialias and mode not in ("bilinear", "bicubic"))
        or (smooth and not input.is_floating_point())
    ):
        raise Unsupported(f"mode {mode!r} with these arguments, {input.dtype} and {n} image dimensions")
    sizes, scales = _sizes(input, n, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{n}d")(input, tuple(sizes))
    tile, work_type = input, torch.float64 if input.dtype == torch.float64 else torch.float32
    for dim in range(-n, 0):
        one = (mode, input.shape[dim], sizes[dim], scales[dim], bool(align_corners), work_type)
        taps = _smooth_taps(*one) if antialias else _taps(*one)
        if (
            mode in ("nearest", "nearest-exact")
            or sizes[dim] != input.shape[dim]
            or scales[dim] not in (None, 1.0)
        ):
            tile = _resample(tile, dim, taps)
    return input.clone() if tile is input else tile.to(input.dtype)  # rounded once, as torch does


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


def _resample(tile: Tile, dim: int, taps: Taps) -> Tile:
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
    return Tile.make(_weighted(buffer, dim, index, weight), tile.mesh, cuts)


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


def _weighted(buffer: Tensor, dim: int, index: Tensor, weight: Tensor | None) -> Tensor:
    index = index.to(buffer.device)
    if weight is None:
        return buffer.index_select(dim, index[:, 0])
    buffer, weight = buffer.to(weight.dtype), weight.to(buffer.device)
    shape = (-1, *(1,) * (-1 - dim))
    taps = range(index.shape[1])
    parts = [buffer.index_select(dim, index[:, k]) * weight[:, k].view(shape) for k in taps]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
