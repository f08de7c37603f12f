"""Replicated values: sums over tiles, and their use together with tiles or parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commsched.spatial.linear import TRANSPOSED
from commsched.spatial.mesh import Mesh
from commsched.transport.channel import Channel


def everyone(
    x: Tensor, mesh: Mesh, axes: tuple[int, ...], what: str, module: str | None = None
) -> list[Tensor]:
    """``x`` of every rank along ``axes``, in rank order (not differentiable)."""
    peers = mesh.peers(axes)
    if len(peers) == 1:
        return [x]
    module = mesh.module if module is None else module
    mesh.count(module, x.nbytes * (len(peers) - 1))
    flat = x.detach().contiguous().view(-1)
    found = exchanged(flat, mesh.channel, peers, f"{module}: {what}")
    return [x if peer == mesh.rank else other.view(x.shape) for peer, other in zip(peers, found)]


def exchanged(mine: Tensor, channel: Channel, peers: Sequence[int], operation: str) -> list[Tensor]:
    """The vectors of all these ranks, of which this is one."""
    found = {peer: torch.empty_like(mine) for peer in peers if peer != channel.rank}
    channel.exchange([(peer, mine) for peer in found], list(found.items()), operation).wait()
    return [found.get(peer, mine) for peer in peers]


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def total(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """The sum over ``axes``, added in rank order: parts become a replicated value, whose gradient all ranks
    share.
    """
    return sum_in_order(everyone(x, mesh, axes, "sum over tiles", module))


def spread(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A replicated value that tiles use: its gradient is the sum of the contributions of all tiles."""
    return x.view_as(x)


def once(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A parameter that meets a replicated value: its gradient counts on the first rank along ``axes`` only,
    so that the sum over tiles is right.
    """
    return x.view_as(x)


def _counted(grad: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """A replicated gradient where it counts, zeros elsewhere."""
    return grad.clone() if all(mesh.coord[axis] == 0 for axis in axes) else torch.zeros_like(grad)


def _shared(x: Tensor, mesh: Mesh, axes: tuple[int, ...], module: str) -> Tensor:
    """The value of the first rank along ``axes``, on all of them."""
    return everyone(x, mesh, axes, "share", module)[0].clone()


TRANSPOSED.update({total: spread, spread: total, once: _counted, _counted: _shared, _shared: _counted})
