"""Replicated values: sums over tiles, and their use together with tiles or parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from commsched.spatial.mesh import Mesh


def everyone(
    x: Tensor, mesh: Mesh, axes: tuple[int, ...], what: str, module: str | None = None
) -> list[Tensor]:
    """``x`` of every rank along ``axes``, in rank order (not differentiable)."""
    peers = mesh.peers(axes)
    if len(peers) == 1:
        return [x]
    module = mesh.module if module is None else module
    flat = x.detach().contiguous().view(-1)
    others = [peer for peer in peers if peer != mesh.rank]
    recvs = {peer: torch.empty_like(flat) for peer in others}
    mesh.count(module, flat.numel() * flat.element_size() * len(others))
    pending = mesh.channel.exchange(
        [(peer, flat) for peer in others], list(recvs.items()), f"{module}: {what}"
    )
    pending.wait()
    return [x if peer == mesh.rank else recvs[peer].view(x.shape) for peer in peers]


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Total(Function):
    """The sum over ``axes``, added in rank order: parts become a replicated value, whose gradient all ranks
    share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str | None = None) -> Tensor:
        ctx.args = mesh, axes, mesh.module if module is None else module
        return sum_in_order(everyone(x, mesh, axes, "sum over tiles", ctx.args[2]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Spread.apply(grad, *ctx.args), None, None, None


class Spread(Function):
    """Use a replicated value in tiles: identity forward; the backward sums the contributions of all tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str | None = None) -> Tensor:
        ctx.args = mesh, axes, mesh.module if module is None else module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Total.apply(grad, *ctx.args), None, None, None


class Once(Function):
    """A parameter meets a replicated value: its gradient counts on the first rank along ``axes`` only, so
    that the sum over tiles is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
        ctx.args = mesh, axes, module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Counted.apply(grad, *ctx.args), None, None, None


class Counted(Function):
    """A replicated gradient where it counts, zeros elsewhere; the transposed of `Shared`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
        ctx.args = mesh, axes, module
        return _counted(grad, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Shared.apply(grad, *ctx.args), None, None, None


class Shared(Function):
    """The value of the first rank along ``axes``, on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
        ctx.args = mesh, axes, module
        return everyone(x, mesh, axes, "share", module)[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Counted.apply(grad, *ctx.args), None, None, None


def _counted(x: Tensor, mesh: Mesh, axes: tuple[int, ...]) -> Tensor:
    return x.clone() if all(mesh.coord[axis] == 0 for axis in axes) else torch.zeros_like(x)
