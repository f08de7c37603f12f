"""New tensors made by a tile: ``x.new_zeros(...)`` and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.folded import ON_FOLDED, Folded, fold
from commsched.spatial.tile import HANDLERS, Tile, handles, sizes_of

_T = torch.Tensor
_creates = partial(handles, into=(HANDLERS, ON_FOLDED))


def _new(tile: Tile, size: list[int], make: Callable[[Tensor, Any], Tensor]) -> Tile:
    """Cut as ``tile`` where the shape is the same; any other shape is whole on every rank."""
    if size == list(tile.shape) and isinstance(tile, Folded):
        return fold(_new(tile.base, list(tile.base.shape), make), tile.counts)
    if size == list(tile.shape):
        return Tile.make(make(tile.local, tile.local.shape), tile.mesh, tile.cuts)
    return Tile.make(make(tile.local, size), tile.mesh, (None,) * len(tile.cuts))


def _alike(method: Any, tile: Any, *sizes: Any, size: Any = None, **options: Any) -> Any:
    wanted = sizes_of(sizes if size is None else (size,))
    return _new(tile, wanted, lambda local, shape: method(local, shape, **options))


for _method in (_T.new_empty, _T.new_zeros, _T.new_ones):
    _creates(_method)(partial(_alike, _method))


@_creates(_T.new_full)
def new_full(tile: Any, size: Any, fill_value: float, **options: Any) -> Any:
    return _new(tile, list(size), lambda local, shape: local.new_full(shape, fill_value, **options))
