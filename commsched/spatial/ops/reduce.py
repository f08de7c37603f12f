"""Sums and means over split dimensions: pooling over all pixels, normalization, and losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from commsched.spatial.intervals import Split, clipped
from commsched.spatial.layout import (
    common_cuts,
    fit,
    local_owned,
    owned_cuts,
    parameter,
    parameters,
    replicate,
    take,
)
from commsched.spatial.mesh import apply, everyone, spread, sum_in_order
from commsched.spatial.mesh import total as total_of_tiles
from commsched.spatial.ops.pointwise import moved, need_channels, with_parameters
from commsched.spatial.tile import (
    Cut,
    Tile,
    Unsupported,
    cut_axes,
    handles,
    image_of,
    local_of,
    tiles_in,
    tree_map,
)

# -- sums and means, global and adaptive pooling -------------------------------------------------------------


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
    """The sum of `total` in ``dtype``, in which it is added up, not rounded to the input's type."""
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
    if not (kind.is_floating_point or kind.is_complex):
        raise Unsupported("it is for real numbers")
    result = unrounded(input, dim, keepdim, wide(kind)) / count
    return result if result.dtype == kind else result.to(kind)


@handles(torch.norm, torch.Tensor.norm, torch.linalg.vector_norm)
def norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = 2, dtype: Any = None
) -> Any:
    """The 2-norm has gradient zero at zero, as torch has it; other norms are of whole dimensions only."""
    if p not in (2, "fro", None) or ord != 2 or dtype is not None:
        return NotImplemented
    input = input.abs() if input.dtype.is_complex else input
    kind = input.dtype
    input = input if wide(kind) == kind else input.to(wide(kind))
    squares = total(input * input, dim, keepdim)
    zero = squares == 0
    result = (squares + zero).sqrt().masked_fill(zero, 0.0)
    return result if result.dtype == kind else result.to(kind)


@handles(torch.var, torch.Tensor.var)
def var(
    input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The variance over all owned pixels of ``dim``, from the deviations of the mean."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    kind, dims = input.dtype, negative_dims(input, dim)
    if not any(cut.dim in dims for _, cut in cut_axes(input.cuts)):
        return NotImplemented
    if not kind.is_floating_point:
        raise Unsupported("it is for real numbers")
    wider = input.to(wide(kind))
    deviations = wider - mean(wider, dims, keepdim=True)
    freedom = prod(input.shape[d] for d in dims) - (int(unbiased) if correction is None else correction)
    return (unrounded(deviations * deviations, dims, keepdim, None) / max(freedom, 0)).to(kind)


@handles(torch.std, torch.Tensor.std)
def std(
    input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The root of the variance; its gradient is zero where it is zero, as torch has it."""
    variance = var(input.to(wide(input.dtype)), dim, unbiased, keepdim, correction=correction)
    if variance is NotImplemented:
        return NotImplemented
    zero = variance == 0
    return (variance + zero).sqrt().masked_fill(zero, 0.0).to(input.dtype)


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
        raise Unsupported("return_indices=True")
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
        local = tile.held
    return Tile.make(local.max(dim, keepdim=True).values, tile.mesh, owned_cuts(tile.cuts))


def _sizes(n: int, input: Any, output_size: Any) -> list[int]:
    values = [output_size] if output_size is None or isinstance(output_size, int) else list(output_size)
    values = values * n if len(values) == 1 else values
    return [int(size if value is None else value) for value, size in zip(values, input.shape[-n:])]


for _n in (1, 2, 3):
    handles(getattr(F, f"adaptive_avg_pool{_n}d"))(partial(_adaptive_avg, _n))
    handles(getattr(F, f"adaptive_max_pool{_n}d"))(partial(_adaptive_max, _n))


# -- batch, group and instance normalization over all pixels of the image, wherever they are -----------------


class MomentRegion:
    """The region over which a normalization takes moments: dimensions, mesh axes, pixel counts."""

    def __init__(self, tile: Tile, dims: list[int], group: int = 1) -> None:
        """``dims`` are counted from the end; ``group`` channels share statistics, as the dimension before
        ``dims``."""
        self.mesh, self.dims = tile.mesh, dims if group == 1 else [dims[0] - 1, *dims]
        self.axes = tuple(axis for axis, cut in cut_axes(tile.cuts) if cut.dim in dims)
        self.module = tile.mesh.module
        self.counts = [group * self._count(tile, dims, rank) for rank in self.mesh.peers(self.axes)]
        self.total = sum(self.counts)
        self.mine = group * self._count(tile, dims, self.mesh.rank)

    def _count(self, tile: Tile, dims: list[int], rank: int) -> int:
        """Pixels per statistic that ``rank`` owns."""
        shape = {dim - tile.ndim: size for dim, size in enumerate(tile.shape)}
        for axis, cut in cut_axes(tile.cuts):
            lo, hi = cut.split.owned(self.mesh.coords[rank][axis])
            shape[cut.dim] = hi - lo
        return prod(shape[dim] for dim in dims)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over all ranks, merged in rank order from each rank's own."""
        if self.mine:
            var, mean = torch.var_mean(x, self.dims, correction=0, keepdim=True)
        else:
            mean = x.sum(self.dims, keepdim=True)
            var = mean
        pairs = everyone(torch.stack([mean, var]), self.mesh, self.axes, "moments")
        if len(pairs) == 1:
            return mean, var
        weights = [count / self.total for count in self.counts]
        whole = sum_in_order([pair[0] * w for pair, w in zip(pairs, weights)])
        return whole, sum_in_order(
            [(pair[1] + (pair[0] - whole) ** 2) * w for pair, w in zip(pairs, weights)]
        )


class Normalize(Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, also returning the moments (not differentiable)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, region: MomentRegion, eps: float
    ) -> Any:
        wide = _wide(x)
        mean, var = region.moments(wide)
        scale = torch.rsqrt(var + eps)
        out = wide - mean
        out *= scale if weight is None else scale * weight
        if bias is not None:
            out += bias
        ctx.region, ctx.eps = region, eps
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: build the gradient from differentiable operations
            sources = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed]
            out = _composed(x, weight, bias, ctx.region, ctx.eps)
            grads = iter(torch.autograd.grad(out, sources, grad, create_graph=True))
            return (*(next(grads) if needed else None for needed in ctx.needs_input_grad[:3]), None, None)
        return (*_gradients(ctx, grad, x, weight, bias, mean, scale), None, None)


def _wide(x: Tensor) -> Tensor:
    """Promote to at least float32, the precision of moments of half-precision values."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


_CHUNK = 1 << 20  # elements per block of the backward, to keep temporaries small


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    region: MomentRegion = ctx.region
    width = max(1, min(x.shape[1], _CHUNK * x.shape[1] // max(x.numel(), 1)))
    chunks = [(lo, min(lo + width, x.shape[1])) for lo in range(0, x.shape[1], width)]
    per_chunk = []
    for lo, hi in chunks:
        inner = _inner(grad, weight, lo, hi)
        normal = (x[:, lo:hi] - mean[:, lo:hi]).mul_(scale[:, lo:hi])
        per_chunk.append(_chunk_sums(_wide(grad[:, lo:hi]), inner, normal, region.dims, weight, bias))
    sums = torch.stack([torch.cat([chunk[k] for chunk in per_chunk], 1) for k in (0, 1)])
    first, second = sum_in_order(
        everyone(sums, region.mesh, region.axes, "gradient of moments", region.module)
    )
    first, second = first / region.total, second / region.total
    grad_x = torch.empty_like(x)
    for lo, hi in chunks:
        part = torch.mul(_inner(grad, weight, lo, hi), scale[:, lo:hi], out=grad_x[:, lo:hi])
        normal = (x[:, lo:hi] - mean[:, lo:hi]).mul_(scale[:, lo:hi])
        part.sub_(normal.mul_(second[:, lo:hi]).add_(first[:, lo:hi]).mul_(scale[:, lo:hi]))
    grad_weight = None if weight is None else torch.cat([chunk[2] for chunk in per_chunk])
    return grad_x, grad_weight, None if bias is None else torch.cat([chunk[-1] for chunk in per_chunk])


def _inner(grad: Tensor, weight: Tensor | None, lo: int, hi: int) -> Tensor:
    """The gradient of the normalized values of some channels (or groups)."""
    part = _wide(grad[:, lo:hi])
    return part if weight is None else part * weight[lo:hi]


def _chunk_sums(
    grad: Tensor, inner: Tensor, normal: Tensor, dims: list[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    first, second = inner.sum(dims, keepdim=True), (inner * normal).sum(dims, keepdim=True)
    sums = [first, second]
    if weight is not None:
        sums.append((grad * normal).sum_to_size((grad.shape[1], *weight.shape[1:])))
    if bias is not None:
        sums.append(grad.sum_to_size((grad.shape[1], *bias.shape[1:])))
    return tuple(sums)


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, region: MomentRegion, eps: float
) -> Tensor:
    """What `Normalize` computes, from operations that can be differentiated again."""
    dims, over = region.dims, (region.mesh, region.axes, region.module)
    wide = _wide(x)
    mean = apply(total_of_tiles, wide.sum(dims, keepdim=True), *over) / region.total
    centered = wide - apply(spread, mean, *over)
    var = apply(total_of_tiles, (centered**2).sum(dims, keepdim=True), *over) / region.total
    out = centered * apply(spread, torch.rsqrt(var + eps), *over)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().reshape(running.shape), alpha=momentum)


def _normalized(
    input: Tile,
    region: MomentRegion,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tile:
    """Normalize by the moments of ``region``; running statistics average moments of separate samples."""
    if any(value is not None for value in (running_mean, running_var, weight, bias)):
        need_channels(input)
    view = (-1, *(1,) * (input.ndim - 2))
    weight, bias = tree_map(lambda t: t.view(view), parameters(input, weight, bias))
    local, mean, var = Normalize.apply(local_of(input), weight, bias, region, eps)
    _update(running_mean, mean.mean(0), momentum)
    _update(running_var, var.mean(0) * (region.total / max(region.total - 1, 1)), momentum)
    return Tile.make(local, input.mesh, input.cuts)


@handles(F.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Statistics over batch and image; running statistics are the same bits on every rank."""
    if not training:
        need_channels(input)
        statistics = running_mean, running_var
        return with_parameters(F.batch_norm, input, *statistics, weight, bias, False, momentum, eps)
    region = MomentRegion(image_of(input), [-input.ndim, *range(2 - input.ndim, 0)])
    if region.total == 0:
        return with_parameters(
            F.batch_norm, input, running_mean, running_var, weight, bias, True, momentum, eps
        )
    if region.total == 1:
        raise ValueError(
            f"{input.mesh.where('batch_norm')}: expected more than 1 value per channel when training, "
            f"got an input of shape {tuple(input.shape)}"
        )
    return _normalized(input, region, running_mean, running_var, weight, bias, momentum, eps)


@handles(F.instance_norm)
def instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Statistics over the image, per sample and channel."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    region = MomentRegion(image_of(input), list(range(2 - input.ndim, 0)))
    return _normalized(input, region, running_mean, running_var, weight, bias, momentum, eps)


@handles(F.group_norm)
def group_norm(
    input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """Statistics over the image and the channels of a group."""
    need_channels(input)
    n, channels = input.ndim - 2, input.shape[1]
    group = channels // num_groups
    region = MomentRegion(input, list(range(-n, 0)), group)
    view = (num_groups, group, *(1,) * n)
    local = local_of(input)
    grouped = local.reshape(local.shape[0], num_groups, group, *local.shape[2:])
    weight, bias = tree_map(lambda t: t.view(view), parameters(input, weight, bias))
    out, _, _ = Normalize.apply(grouped, weight, bias, region, eps)
    return Tile.make(out.reshape(local.shape), input.mesh, input.cuts)


# -- losses per pixel: computed on the parts, summed or averaged over the whole ------------------------------


def _check(size_average: Any, reduce: Any, reduction: str) -> None:
    if size_average is not None or reduce is not None:
        raise Unsupported("size_average and reduce; use reduction")
    if reduction not in ("none", "mean", "sum"):
        raise Unsupported(f"reduction={reduction!r}")


def _reduced(losses: Tile, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _register(function: Callable[..., Tensor]) -> None:
    @handles(function)
    def loss(
        input: Any,
        target: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Any:
        _check(size_average, reduce, reduction)
        tiles = list(tiles_in((input, target, options)))
        mesh, cuts = tiles[0].mesh, common_cuts(tiles)
        args, others = tree_map(lambda t: fit(t, mesh, cuts), ((input, target), options))
        losses = Tile.make(function(*args, reduction="none", **others), mesh, cuts)
        weight = options.get("weight")
        if weight is not None and reduction == "mean" and function in (F.mse_loss, F.l1_loss):
            return losses.sum() / weight.sum()
        return _reduced(losses, reduction)


for _function in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
):
    _register(_function)


def _classified(
    function: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Per pixel over the channels; the mean weighs classes and leaves out ``ignore_index`` as torch does."""
    _check(size_average, reduce, reduction)
    mesh, cuts = image_of(input).mesh, common_cuts(list(tiles_in((input, target))))
    if any(cut.dim < 2 - input.ndim for _, cut in cut_axes(cuts)):
        raise Unsupported("the classes must be dimension 1 of an image")
    weight = None if weight is None else parameter(weight, mesh, cuts)
    scores, wanted = fit(input, mesh, cuts), fit(target, mesh, cuts)
    local = function(scores, wanted, weight, ignore_index=ignore_index, reduction="none", **options)
    losses, kind = Tile.make(local, mesh, cuts), wide(local.dtype)
    if reduction != "mean":
        return _reduced(losses, reduction)
    if wanted.is_floating_point():  # class probabilities: the mean is over pixels
        return (unrounded(losses, None, False, kind) / losses.numel()).to(local.dtype)
    counted = (wanted != ignore_index).to(kind)
    if weight is not None:
        counted = counted * weight.detach()[wanted.masked_fill(wanted == ignore_index, 0)]
    return (unrounded(losses, None, False, kind) / Tile.make(counted, mesh, cuts).sum()).to(local.dtype)


for _classifying in (F.cross_entropy, F.nll_loss):
    handles(_classifying)(partial(_classified, _classifying))
