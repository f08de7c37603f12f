"""Operations on folded tiles: on the base, whose dimensions are not merged, or on the gathered whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.folded import ON_FOLDED, Folded, fold, gathered_tiles, reshaped, unfolded
from commsched.spatial.layout import replicate
from commsched.spatial.ops.contract import CONTRACTIONS
from commsched.spatial.ops.pad import explicit
from commsched.spatial.ops.pointwise import ALONG, base_name, is_pointwise
from commsched.spatial.ops.shape import PERMUTATIONS
from commsched.spatial.tile import ON_ALL, Tile, cut_axes, is_inplace, tiles_in, tree_map, unsupported

_T = torch.Tensor
_DROPOUT = (F.dropout, torch.dropout)
_NORMS = (F.layer_norm, F.linear, F.batch_norm, F.instance_norm, F.group_norm)
_TOTALS = (torch.sum, _T.sum, torch.mean, _T.mean)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """``func`` of at least one folded tile."""
    first = args[0] if args else kwargs.get("input")
    if func in CONTRACTIONS:
        return CONTRACTIONS[func](*args, **kwargs)
    if func in ON_FOLDED and isinstance(first, Folded):
        return ON_FOLDED[func](*args, **kwargs)
    if is_pointwise(func):
        return _pointwise(func, args, kwargs)
    if isinstance(first, Folded):
        answer = _on_base(func, first, args, kwargs)
        if answer is not NotImplemented:
            return answer
    if is_inplace(func, kwargs) or func in ON_ALL:
        return unsupported(func, args, kwargs, "the tensor is a reshaped tile")
    return func(*gathered_tiles(args), **gathered_tiles(kwargs))


Folded.run = staticmethod(run)


def _on_base(func: Any, tile: Folded, args: tuple, kwargs: dict) -> Any:
    name = base_name(func)
    if func in _DROPOUT:
        return _refolded(func(tile.base, *args[1:], **kwargs), tile)
    if func in _NORMS:
        kept = (-1,) if func in (F.layer_norm, F.linear) else (0, 1)
        plain = not any(isinstance(t, Folded) for t in tiles_in((args[1:], kwargs)))
        if plain and all(_is_whole(tile, dim) for dim in kept):
            return _refolded(func(tile.base, *args[1:], **kwargs), tile)
    if func in PERMUTATIONS:
        order = PERMUTATIONS[func](tile.ndim, *args[1:], **kwargs)
        dims = [dim for d in order for dim in _dims(tile, d)]
        return fold(tile.base.permute(dims), [tile.counts[d] for d in order])
    if func is _T.__getitem__:
        return _getitem(tile, args[1])
    if func in _TOTALS or name in ALONG:
        return _along(func, tile, args, kwargs)
    return NotImplemented


def _refolded(result: Any, tile: Folded) -> Any:
    """Results have the base's dimensions, perhaps behind others; a function in place returns the tile."""

    def refold(value: Any) -> Any:
        return tile if value is tile.base else fold(value, (1,) * (value.ndim - tile.base.ndim) + tile.counts)

    return tree_map(refold, result)


def _dims(tile: Folded, dim: int) -> range:
    """The dimensions of the base that ``dim`` merges."""
    dim %= tile.ndim
    start = sum(tile.counts[:dim])
    return range(start, start + tile.counts[dim])


def _is_whole(tile: Folded, dim: int) -> bool:
    """Whether every rank holds all of ``dim``."""
    cut = {cut.dim + tile.base.ndim for _, cut in cut_axes(tile.base.cuts)}
    return not cut & set(_dims(tile, dim))


def _along(func: Any, tile: Folded, args: tuple, kwargs: dict) -> Any:
    """Functions along whole dimensions; sums and means along any."""
    name = base_name(func)
    position, default = (1, None) if func in _TOTALS else ALONG[name]
    given = kwargs.get("dim", args[position] if len(args) > position else default)
    if given is None and func in _TOTALS:
        given = tuple(range(tile.ndim))
    chosen = (given,) if isinstance(given, int) else given
    if not isinstance(chosen, (tuple, list)) or not all(isinstance(dim, int) for dim in chosen):
        return NotImplemented
    counts = list(tile.counts)
    if name == "unsqueeze":
        at = chosen[0] % (tile.ndim + 1)
        base_dims: Any = sum(tile.counts[:at])
        counts.insert(at, 1)
    else:
        chosen = [dim % tile.ndim for dim in chosen]
        if func not in _TOTALS and not all(_is_whole(tile, dim) for dim in chosen):
            return NotImplemented
        base_dims = [dim for d in chosen for dim in _dims(tile, d)]
        base_dims = base_dims[0] if isinstance(given, int) and len(base_dims) == 1 else tuple(base_dims)
    if "dim" in kwargs or len(args) <= position:
        kwargs = {**kwargs, "dim": base_dims}
    else:
        args = (*args[:position], base_dims, *args[position + 1 :])
    result = func(tile.base, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
    left = [count for dim, count in enumerate(counts) if dim not in chosen]

    def refold(part: Any) -> Any:
        return fold(part, counts if part.ndim == sum(counts) else left) if isinstance(part, Tile) else part

    return tree_map(refold, result)


def _getitem(tile: Folded, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(e, (int, slice)) or e is None or e is Ellipsis for e in entries):
        return NotImplemented
    wide: list[Any] = []
    counts, dim = [], 0
    for entry in explicit(entries, tile.ndim):
        if entry is None:
            wide.append(None)
            counts.append(1)
            continue
        count = tile.counts[dim]
        if count > 1 and entry != slice(None):
            return NotImplemented
        wide += [entry] * count
        counts += [] if isinstance(entry, int) else [count]
        dim += 1
    return fold(tile.base[tuple(wide)], counts)


def _pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """On the base of the first folded tile, as which the other operands are reshaped."""
    tile = next(t for t in tiles_in((args, kwargs)) if isinstance(t, Folded))
    if is_inplace(func, kwargs):
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, Folded):
            return unsupported(func, args, kwargs, "it would write a reshaped tile into another tensor")
        tile = target
    plain_args, plain_kwargs = tree_map(lambda t: _alike(t, tile), (args, kwargs))
    return _refolded(func(*plain_args, **plain_kwargs), tile)


def _alike(value: Tensor, tile: Folded) -> Tensor:
    """``value``, which broadcasts against ``tile``, with the dimensions of its base."""
    if isinstance(value, Folded) and value.counts == tile.counts and value.base.shape == tile.base.shape:
        return value.base
    value = value.whole if isinstance(value, Folded) else value
    if value.ndim == 0:
        return value
    sizes: list[int] = list(value.shape[: max(value.ndim - tile.ndim, 0)])
    merged = False
    for dim in range(-min(value.ndim, tile.ndim), 0):
        factors = [tile.base.shape[d] for d in _dims(tile, dim)]
        merged = merged or len(factors) > 1
        sizes += (
            factors if value.shape[dim] == tile.shape[dim] else [value.shape[dim]] + [1] * (len(factors) - 1)
        )
    if not merged:
        return value
    if isinstance(value, Tile) and not value.replicated:
        like = unfolded(reshaped(value, sizes))
        value = like if list(like.shape) == sizes else replicate(value)
    return value.reshape(sizes)
