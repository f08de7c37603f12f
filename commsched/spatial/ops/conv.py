"""Convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.fetch import fetch
from commsched.spatial.intervals import TransposedWindow, Window
from commsched.spatial.layout import enter
from commsched.spatial.ops.windows import at_least, each, part_of, planned, visit, windowed, without
from commsched.spatial.saved import compact
from commsched.spatial.tile import Tile, cut_axes, handles, local_of, unsupported

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
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not isinstance(input, Tile):
        return unsupported(_CONV[n], (input, weight, bias), {}, "the weight is split and the image is not")
    kernel, stride, dilation = weight.shape[2:], each(stride, n), each(dilation, n)
    pads = _paddings(padding, n, kernel, dilation)
    windows = [Window(k, s, d, *p) for k, s, d, p in zip(kernel, stride, dilation, pads)]
    for _, cut in cut_axes(input.cuts):
        pads[cut.dim] = (0, 0)  # it is in the buffer
    uneven = [p for pair in reversed(pads) for p in pair] if any(a != b for a, b in pads) else None
    rest = [0 if uneven else before for before, _ in pads]
    weight, bias = enter(weight, input.mesh, input.cuts), _entered(bias, input)

    def compute(buffer: Tensor) -> Tensor:
        padded = F.pad(buffer, uneven) if uneven else buffer
        return _CONV[n](padded, weight, bias, stride, rest, dilation, groups)

    return windowed(input, windows, False, 0.0, compute, work=weight.numel())


def _entered(parameter: Tensor | None, tile: Tile) -> Tensor | None:
    return None if parameter is None else enter(parameter, tile.mesh, tile.cuts)


def _convolve_transposed(
    n: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if not isinstance(input, Tile):
        return unsupported(
            _TRANSPOSED[n], (input, weight, bias), {}, "the weight is split and the image is not"
        )
    per_dim = zip(
        weight.shape[2:], each(stride, n), each(dilation, n), each(padding, n), each(output_padding, n)
    )
    windows = [TransposedWindow(k, s, d, p, p, extra) for k, s, d, p, extra in per_dim]
    site, cuts, plan = planned(input, windows)
    tile = local_of(input)
    received: list[Tensor] = []
    visit(input, site, plan, windows, cuts, weight.numel())
    fetched = buffer = fetch(tile, plan, input.mesh, 0.0, received)
    unreached = [cut.dim for _, cut in cut_axes(cuts) if buffer.shape[cut.dim] == 0]  # no input writes there
    buffer = at_least(buffer, dict.fromkeys(unreached, 1))
    weight, bias = enter(weight, input.mesh, cuts), _entered(bias, input)
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
        local = local + bias.view(-1, *(1,) * n)
    return Tile.make(local, input.mesh, cuts)


for _n in (1, 2, 3):
    handles(_CONV[_n], getattr(torch, f"conv{_n}d"))(partial(_convolve, _n))
    handles(_TRANSPOSED[_n], getattr(torch, f"conv_transpose{_n}d"))(partial(_convolve_transposed, _n))


@handles(F.unfold)
def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """Columns of patches; each stays with the rank that owns its middle."""
    kernel, dilation, stride = each(kernel_size, 2), each(dilation, 2), each(stride, 2)
    pads = list(each(padding, 2))
    windows = [Window(k, s, d, p, p) for k, s, d, p in zip(kernel, stride, dilation, pads)]
    for _, cut in cut_axes(input.cuts):
        pads[cut.dim] = 0

    def compute(buffer: Tensor) -> Tensor:
        sizes = [w.outputs(n + 2 * p - w.before - w.after)
                 for w, n, p in zip(windows, buffer.shape[-2:], pads)]  # fmt: skip
        columns = F.unfold(buffer, kernel, dilation, tuple(pads), stride)
        return columns.reshape(*columns.shape[:-1], *sizes)

    patches = windowed(input, windows, False, 0.0, compute, work=kernel[0] * kernel[1] * input.shape[1])
    return patches.flatten(-2)
