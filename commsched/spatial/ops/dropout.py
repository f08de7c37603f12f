"""Dropout and masks that depend on the position in the whole tensor, hence not on the grid."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.layout import fit
from commsched.spatial.replicated import everyone
from commsched.spatial.shared_random import draws, shared_seed
from commsched.spatial.tile import Tile, cut_axes, handles_all, local_of, unsupported

_STEP, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def random_bits(positions: Tensor, seed: int) -> Tensor:
    """53 well mixed bits per position (the finalizer of splitmix64), as non-negative integers."""
    x = positions * _STEP + seed
    x = (x ^ _shifted(x, 30)) * _MIX1
    x = (x ^ _shifted(x, 27)) * _MIX2
    return _shifted(x ^ _shifted(x, 31), 11)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def chosen(
    shape: torch.Size,
    bounds: tuple[tuple[int, int], ...],
    p: float | Tensor,
    seed: int,
    device: torch.device,
) -> Tensor:
    """Which elements within ``bounds`` of a tensor of global ``shape`` are chosen, with probability ``p``."""
    local = [hi - lo for lo, hi in bounds]
    mask = torch.empty(local, dtype=torch.bool, device=device)
    threshold = round(p * (1 << 53)) if isinstance(p, float) else (p.double() * (1 << 53)).expand(local)
    for row in range(local[0]):  # one sample at a time: positions take eight bytes per element
        position = torch.tensor(bounds[0][0] + row, device=device)
        for size, (lo, hi) in zip(shape[1:], bounds[1:]):
            position = position.unsqueeze(-1) * size + torch.arange(lo, hi, device=device)
        limit = threshold if isinstance(threshold, int) else threshold[row]
        mask[row] = random_bits(position, seed) < limit
    return mask


def _held_bounds(tile: Tile) -> list[tuple[int, int]]:
    bounds = [(0, size) for size in tile.shape]
    for axis, cut in cut_axes(tile.cuts):
        bounds[cut.dim] = cut.split.held(tile.mesh.coord[axis])
    return bounds


def _drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, channels: bool) -> Any:
    """``channels``: drop whole channels, the same ones in every tile."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{input.mesh.where('dropout')}: probability must be between 0 and 1, got {p}")
    local: Tensor = local_of(input)
    if not training or p == 0.0:
        return input
    bounds, shape = _held_bounds(input), list(input.shape)
    if channels:
        bounds[2:], shape[2:] = [(0, 1)] * (input.ndim - 2), [1] * (input.ndim - 2)
    mask = chosen(torch.Size(shape), tuple(bounds), p, shared_seed(input.mesh, local.device), local.device)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    if inplace:
        local.masked_fill_(mask, 0.0).mul_(scale)
        return input
    return Tile.make(local.masked_fill(mask, 0.0) * scale, input.mesh, input.cuts)


handles_all(F.dropout, torch.dropout)(partial(_drop, channels=False))
handles_all(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)(partial(_drop, channels=True))


@handles_all(torch.Tensor.bernoulli_)
def bernoulli_(tile: Tile, p: float | Tensor = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return unsupported(torch.Tensor.bernoulli_, (tile, p), {}, "each rank has another generator")
    tile.local.copy_(_bernoulli(tile, p))
    return tile


@handles_all(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: Any, p: float | None = None, *, generator: Any = None, out: Any = None) -> Any:
    """With probability ``p``, or that of each element of ``input``."""
    if generator is not None or out is not None or not isinstance(input, Tile):
        return unsupported(torch.bernoulli, (input, p), {}, "generator= and out= would differ between ranks")
    return Tile.make(_bernoulli(input, input if p is None else p), input.mesh, input.cuts)


def _bernoulli(tile: Tile, p: float | Tensor) -> Tensor:
    """Ones and zeros. A mask without image dimensions (of drop path) has torch's own numbers."""
    mesh = tile.mesh
    probability: Any = fit(p, mesh, tile.cuts).detach() if isinstance(p, Tensor) else float(p)
    if tile.replicated and all(dim < -tile.ndim or tile.shape[dim] == 1 for dim in mesh.dims):
        drawn = torch.zeros_like(tile.local)
        if draws(mesh):
            drawn.bernoulli_(probability)
        return everyone(drawn, mesh, tuple(range(len(mesh.grid))), "random mask")[0]
    seed = shared_seed(mesh, tile.device)
    return chosen(tile.shape, tuple(_held_bounds(tile)), probability, seed, tile.device).to(tile.dtype)
