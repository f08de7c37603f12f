"""Batch, group and instance normalization over all pixels of the image, wherever they are."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from commsched.spatial.layout import enter, owned_in_held
from commsched.spatial.linear import apply
from commsched.spatial.ops.pointwise import with_parameters
from commsched.spatial.replicated import everyone, spread, sum_in_order, total
from commsched.spatial.tile import Tile, cut_axes, handles, local_of


class Region:
    """The region over which a normalization takes moments: dimensions, mesh axes, pixel counts."""

    def __init__(self, tile: Tile, dims: list[int], group: int = 1) -> None:
        """``dims`` are counted from the end; ``group`` channels share statistics, as the dimension before
        ``dims``."""
        self.mesh, self.dims = tile.mesh, dims if group == 1 else [dims[0] - 1, *dims]
        self.axes = tuple(axis for axis, cut in cut_axes(tile.cuts) if cut.dim in dims)
        self.owned, self.module = owned_in_held(tile), tile.mesh.module
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

    def crop(self, x: Tensor) -> Tensor:
        """The owned pixels of what the rank holds."""
        for dim, lo, length in self.owned:
            x = x.narrow(dim, lo, length)
        return x

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance over all ranks, merged in rank order from each rank's own."""
        x = self.crop(x)
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
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, region: Region, eps: float
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
            found = iter(torch.autograd.grad(out, sources, grad, create_graph=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:3]), None, None)
        return (*_gradients(ctx, grad, x, weight, bias, mean, scale), None, None)


def _wide(x: Tensor) -> Tensor:
    """Promote to at least float32, the precision of moments of half-precision values."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


_CHUNK = 1 << 20  # elements per block of the backward, to keep temporaries small


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    region: Region = ctx.region
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
        # The moments came from owned pixels only, so only those carry their gradient.
        share = region.crop(normal).mul_(second[:, lo:hi]).add_(first[:, lo:hi]).mul_(scale[:, lo:hi])
        region.crop(part).sub_(share)
    grad_weight = None if weight is None else torch.cat([chunk[2] for chunk in per_chunk])
    return grad_x, grad_weight, None if bias is None else torch.cat([chunk[3] for chunk in per_chunk])


def _inner(grad: Tensor, weight: Tensor | None, lo: int, hi: int) -> Tensor:
    """The gradient of the normalized values of some channels (or groups)."""
    part = _wide(grad[:, lo:hi])
    return part if weight is None else part * weight[lo:hi]


def _chunk_sums(
    grad: Tensor, inner: Tensor, normal: Tensor, dims: list[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, ...]:
    first, second = inner.sum(dims, keepdim=True), (inner * normal).sum(dims, keepdim=True)
    if weight is None:
        return first, second
    shape = (grad.shape[1], *weight.shape[1:])
    grad_bias = first.new_empty(0) if bias is None else grad.sum_to_size(shape)
    return first, second, (grad * normal).sum_to_size(shape), grad_bias


def _composed(x: Tensor, weight: Tensor | None, bias: Tensor | None, region: Region, eps: float) -> Tensor:
    """The same from differentiable parts."""
    dims, over = region.dims, (region.mesh, region.axes, region.module)
    wide = _wide(x)
    mean = apply(total, region.crop(wide).sum(dims, keepdim=True), *over) / region.total
    centered = wide - apply(spread, mean, *over)
    var = apply(total, (region.crop(centered) ** 2).sum(dims, keepdim=True), *over) / region.total
    out = centered * apply(spread, torch.rsqrt(var + eps), *over)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


def _per_channel(parameter: Tensor | None, tile: Tile, *shape: int) -> Tensor | None:
    return None if parameter is None else enter(parameter, tile.mesh, tile.cuts).view(*shape)


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().reshape(running.shape), alpha=momentum)


def _normalized(
    input: Tile,
    region: Region,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tile:
    """Normalize by the moments of ``region``; running statistics average moments of separate samples."""
    view = (-1, *(1,) * (input.ndim - 2))
    local, mean, var = Normalize.apply(
        local_of(input),
        _per_channel(weight, input, *view),
        _per_channel(bias, input, *view),
        region,
        eps,
    )
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
        statistics = running_mean, running_var
        return with_parameters(F.batch_norm, input, *statistics, weight, bias, False, momentum, eps)
    region = Region(input, [-input.ndim, *range(2 - input.ndim, 0)])
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
    region = Region(input, list(range(2 - input.ndim, 0)))
    return _normalized(input, region, running_mean, running_var, weight, bias, momentum, eps)


@handles(F.group_norm)
def group_norm(
    input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """Statistics over the image and the channels of a group."""
    n, channels = input.ndim - 2, input.shape[1]
    group = channels // num_groups
    region = Region(input, list(range(-n, 0)), group)
    view = (num_groups, group, *(1,) * n)
    local = local_of(input)
    grouped = local.reshape(local.shape[0], num_groups, group, *local.shape[2:])
    out, _, _ = Normalize.apply(
        grouped, _per_channel(weight, input, *view), _per_channel(bias, input, *view), region, eps
    )
    return Tile.make(out.reshape(local.shape), input.mesh, input.cuts)
