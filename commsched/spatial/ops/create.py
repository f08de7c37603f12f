"""New tensors made by a tile: ``x.new_zeros(...)`` and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.folded import Folded, fold
from commsched.spatial.tile import Tile, handles

_T = torch.Tensor


CREATIONS: dict[Any, Callable[..., Any]] = {}


def _creates(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        CREATIONS[function] = handler
        return handles(function)(handler)

    return register


def _new(tile: Tile, size: list[int], make: Callable[[Tensor, Any], Tensor]) -> Tile:
    """Cut as ``tile`` where the shape is the same; any other shape is whole on every rank."""
    if size == list(tile.shape) and isinstance(tile, Folded):
        return fold(_new(tile.base, list(tile.base.shape), make), tile.counts)
    if size == list(tile.shape):
        return Tile.make(make(tile.local, tile.local.shape), tile.mesh, tile.cuts)
    return Tile.make(make(tile.local, size), tile.mesh, (None,) * len(tile.cuts))


def _sizes(sizes: Any) -> list[int]:
    return list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)


def _register(name: str) -> None:
    method = getattr(_T, name)

    @_creates(method)
    def new(tile: Any, *sizes: Any, size: Any = None, **options: Any) -> Any:
        wanted = _sizes(sizes if size is None else (size,))
        return _new(tile, wanted, lambda local, shape: method(local, shape, **options))


for _name in ("new_empty", "new_zeros", "new_ones"):
    _register(_name)


@_creates(_T.new_full)
def new_full(tile: Any, size: Any, fill_value: float, **options: Any) -> Any:
    return _new(tile, list(size), lambda local, shape: local.new_full(shape, fill_value, **options))
