"""Pooling with windows."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Window
from commsched.spatial.ops.reduce import wide
from commsched.spatial.ops.windows import each, part_of, windowed
from commsched.spatial.tile import Tile, cut_axes, handles, unsupported

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


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
        return unsupported(_MAX[n], (input, kernel_size), {}, "return_indices=True")
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
    windows = _windows(n, kernel_size, stride, padding)
    rest = _rest(input, windows)
    work = prod(w.kernel for w in windows) * input.shape[1]
    sums = windowed(
        input, windows, ceil_mode, 0.0, lambda b: _window_sums(n, b, windows, rest, ceil_mode), work
    )
    local, cuts = sums.local, sums.cuts
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
    handles(_MAX[_n], getattr(torch, f"max_pool{_n}d"), getattr(F, f"max_pool{_n}d_with_indices"))(
        partial(_max_pool, _n)
    )
    handles(getattr(F, f"avg_pool{_n}d"))(partial(_avg_pool, _n))
