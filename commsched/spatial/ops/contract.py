"""Matrix products and attention: rows (queries) and batches (windows) stay cut; what is summed over (keys and
values) is gathered.

Dimensions have letters, as in ``einsum``. A dimension of a folded tile consists of several factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.intervals import Split
from commsched.spatial.layout import (
    ON_FOLDED,
    Folded,
    counts_of,
    enter,
    fold,
    gathered,
    gathered_tiles,
    recut,
    replicate,
    reshaped,
    trimmed,
    unfolded,
)
from commsched.spatial.ops.gradients import GRADIENTS
from commsched.spatial.ops.pointwise import ALONG, base_name, is_pointwise
from commsched.spatial.ops.shape import PERMUTATIONS, explicit
from commsched.spatial.tile import (
    HANDLERS,
    Cut,
    Tile,
    Unsupported,
    called,
    cut_axes,
    handles,
    is_inplace,
    tiles_in,
    tree_map,
)

_T = torch.Tensor
_BATCH = "ZYXWVUTSRQPONM"
CONTRACTIONS: dict[Any, Callable[..., Any]] = {}


class _Place(NamedTuple):
    """One mesh axis cuts a dimension: the dimension's letter, the factor of it that is cut, and the split."""

    letter: str
    factor: int
    split: Split


class _Operand:
    """A tensor with a letter for each dimension."""

    def __init__(self, letters: str, value: Tensor) -> None:
        self.letters, self.shape = letters, tuple(value.shape)
        self.base = trimmed(unfolded(value)) if isinstance(value, Tile) else value
        counts = counts_of(value)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self.factors = {
            letter: list(self.base.shape[start : start + count])
            for letter, start, count in zip(letters, starts, counts)
        }
        cuts = self.base.cuts if isinstance(self.base, Tile) else ()
        owner = [(letter, k) for letter, count in zip(letters, counts) for k in range(count)]
        self.places = [None if cut is None else _Place(*owner[cut.dim], cut.split) for cut in cuts]


class _Frame:
    """How the result is cut: as the first operand with a cut dimension that the result has."""

    def __init__(self, kept: str, operands: Sequence[_Operand]) -> None:
        self.mesh = next(o.base.mesh for o in operands if isinstance(o.base, Tile))
        self.places: list[_Place | None] = [None] * len(self.mesh.grid)
        self.factors: dict[str, list[int]] = {}
        for operand in operands:
            for axis, place in enumerate(operand.places):
                taken = place is not None and any(p and p[:2] == place[:2] for p in self.places)
                if place is not None and place.letter in kept and self.places[axis] is None and not taken:
                    own = operand.factors[place.letter]
                    if self.factors.setdefault(place.letter, own) == own:
                        self.places[axis] = place

    def fit(self, operand: _Operand) -> Tensor:
        """This rank's part of ``operand``: whole in dimensions that the result does not have."""
        local, present = self._fetched(operand)
        refined, narrow = [], []
        for letter, size in zip(operand.letters, operand.shape):
            factors = self.factors.get(letter)
            if factors is None or size != prod(factors):  # whole, or broadcast
                refined.append(size)
                continue
            for k, length in enumerate(factors):
                axis = next((a for a, p in enumerate(self.places) if p and p[:2] == (letter, k)), None)
                if axis is not None:
                    lo, hi = self._owned(axis)
                    if axis in present:
                        length = hi - lo
                    else:
                        narrow.append((len(refined), lo, hi - lo))
                refined.append(length)
        local = local.reshape(refined)
        for dim, lo, length in narrow:
            local = local.narrow(dim, lo, length)
        return local.reshape(
            [self._length(letter, size) for letter, size in zip(operand.letters, operand.shape)]
        )

    def _fetched(self, operand: _Operand) -> tuple[Tensor, set[int]]:
        """The local part, and the axes along which it is cut as the result is."""
        value, whole, targets, present = operand.base, [], {}, set()
        for axis, (own, place) in enumerate(zip(operand.places, self.places)):
            if own is None:
                continue
            same = place is not None and own[:2] == place[:2]
            if place is not None and same and operand.factors[own.letter] == self.factors[own.letter]:
                present.add(axis)
                if own.split != place.split:
                    targets[axis] = place.split
            else:
                whole.append(axis)
        if isinstance(value, Tile):
            value = replicate(value, tuple(whole)) if whole else value
            value = recut(value, targets) if targets else value
        cuts = tuple(None if place is None else Cut(-1, place.split) for place in self.places)
        return enter(value, self.mesh, cuts), present

    def _owned(self, axis: int) -> tuple[int, int]:
        place = self.places[axis]
        assert place is not None
        return place.split.owned(self.mesh.coord[axis])

    def _length(self, letter: str, size: int) -> int:
        """This rank's part of a dimension of the result's cut."""
        factors = self.factors.get(letter)
        return size if factors is None or size != prod(factors) else prod(self._lengths(letter))

    def _lengths(self, letter: str) -> list[int]:
        lengths = list(self.factors[letter])
        for axis, place in enumerate(self.places):
            if place is not None and place.letter == letter:
                lo, hi = self._owned(axis)
                lengths[place.factor] = hi - lo
        return lengths

    def result(self, letters: str, local: Tensor) -> Tile:
        """``local``, whose dimensions have ``letters``, as a tile."""
        sizes: list[int] = []
        counts: list[int] = []
        at: dict[tuple[str, int], int] = {}
        for letter, size in zip(letters, local.shape):
            own = self._lengths(letter) if letter in self.factors else [size]
            at |= {(letter, k): len(sizes) + k for k in range(len(own))}
            sizes += own
            counts.append(len(own))
        cuts = tuple(None if p is None else Cut(at[p[:2]] - len(sizes), p.split) for p in self.places)
        return fold(Tile.make(local.reshape(sizes), self.mesh, cuts), counts)


_register = partial(handles, into=(HANDLERS, CONTRACTIONS))


def _contract(
    func: Callable[..., Tensor], letters: Sequence[str], out: str, values: Sequence[Tensor]
) -> Tile:
    operands = [_Operand(own, value) for own, value in zip(letters, values)]
    frame = _Frame(out, operands)
    return frame.result(out, func(*(frame.fit(operand) for operand in operands)))


def _batch(ndim: int, inner: str) -> str:
    """Letters for ``ndim`` dimensions of which the last have the letters ``inner``."""
    return _BATCH[: ndim - len(inner)][::-1] + inner


@_register(torch.matmul, _T.matmul, _T.__matmul__, torch.bmm, _T.bmm)
def matmul(input: Any, other: Any) -> Any:
    """Rows of ``input`` and batches stay cut; columns of ``other`` too if nothing else is."""
    if input.ndim < 2 or other.ndim < 2:
        raise Unsupported("a product with a vector")
    out = _batch(max(input.ndim, other.ndim), "ij")
    return _contract(torch.matmul, (_batch(input.ndim, "ik"), _batch(other.ndim, "kj")), out, (input, other))


@_register(torch.einsum)
def einsum(equation: Any, *operands: Any) -> Any:
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    plain = equation.replace(" ", "") if isinstance(equation, str) else ""
    inputs, arrow, out = plain.partition("->")
    letters = inputs.split(",")
    if not arrow or "." in plain or any(len(set(own)) != len(own) for own in letters):
        raise Unsupported("only letters, each once, and an arrow")
    return _contract(lambda *parts: torch.einsum(plain, *parts), letters, out, values)


@_register(F.scaled_dot_product_attention)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Queries stay cut, keys and values only along a batch."""
    if is_causal or enable_gqa or dropout_p:
        raise Unsupported("is_causal, enable_gqa or dropout_p on split tokens")
    operands = [
        _Operand(_batch(t.ndim, inner), t) for t, inner in ((query, "ik"), (key, "jk"), (value, "je"))
    ]
    if attn_mask is not None:
        operands.append(_Operand(_batch(attn_mask.ndim, "ij"), attn_mask))
    frame = _Frame(_batch(query.ndim, "i"), operands)
    q, k, v, *mask = (frame.fit(operand) for operand in operands)
    local = F.scaled_dot_product_attention(q, k, v, mask[0] if mask else None, scale=scale)
    return frame.result(_batch(query.ndim, "ie"), local)


@_register(F.multi_head_attention_forward)
def multi_head_attention(*args: Any, **options: Any) -> Any:
    """On gathered tokens: torch does it in one function that cannot be taken apart."""
    tree = tree_map(lambda t: gathered(t) if isinstance(t, Tile) else t, (args, options))
    return F.multi_head_attention_forward(*tree[0], **tree[1])


# -- operations on folded tiles: on the base, whose dimensions are not merged, or on the gathered whole ------

_DROPOUT = (F.dropout, torch.dropout)
_NORMS = (F.layer_norm, F.linear, F.batch_norm, F.instance_norm, F.group_norm)
_TOTALS = (torch.sum, _T.sum, torch.mean, _T.mean)


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """``func`` of at least one folded tile. For what is not supported its tokens are gathered unasked."""
    first = args[0] if args else None
    with suppress(Unsupported):
        if func in CONTRACTIONS:
            return called(CONTRACTIONS[func], args, kwargs)
        if is_pointwise(func):
            return _pointwise(func, args, kwargs)
        if isinstance(first, Folded):
            if func in ON_FOLDED:
                return called(ON_FOLDED[func], args, kwargs)
            return _on_base(func, first, args, kwargs)
    if is_inplace(func, kwargs) or func in GRADIENTS:
        raise Unsupported("the tensor is a reshaped tile", gather=func not in GRADIENTS)
    return func(*gathered_tiles(args), **gathered_tiles(kwargs))


Folded.run = staticmethod(run)


def _on_base(func: Any, tile: Folded, args: tuple, kwargs: dict) -> Any:
    name = base_name(func)
    if func in _DROPOUT:
        return _refolded(Tile._on_parts(func, (tile.base, *args[1:]), kwargs), tile)
    if func in _NORMS:
        kept: Sequence[int] = (-1,) if func is F.linear else (0, 1)
        if func is F.layer_norm:
            kept = range(-len(kwargs["normalized_shape"] if len(args) == 1 else args[1]), 0)
        plain = not any(isinstance(t, Folded) for t in tiles_in((args[1:], kwargs)))
        if plain and all(_is_whole(tile, dim) for dim in kept):
            return _refolded(Tile._on_parts(func, (tile.base, *args[1:]), kwargs), tile)
    if func in PERMUTATIONS:
        order = PERMUTATIONS[func](tile.ndim, *args[1:], **kwargs)
        dims = [dim for d in order for dim in _dims(tile, d)]
        return fold(tile.base.permute(dims), [tile.counts[d] for d in order])
    if func is _T.__getitem__:
        return _getitem(tile, args[1])
    if func in _TOTALS or name in ALONG:
        return _along(func, tile, args, kwargs)
    raise Unsupported


def _refolded(result: Any, tile: Folded) -> Any:
    """Results have the base's dimensions, perhaps after others; a function in place returns the tile."""

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
    if not isinstance(chosen, (tuple, list)) or not all(type(dim) is int for dim in chosen):
        raise Unsupported
    if name == "cosine_similarity":  # its second operand is no part of the base
        raise Unsupported
    counts = list(tile.counts)
    if name == "unsqueeze":
        at = chosen[0] % (tile.ndim + 1)
        base_dims: Any = sum(tile.counts[:at])
        counts.insert(at, 1)
    else:
        chosen = [dim % tile.ndim for dim in chosen]
        if func not in _TOTALS and not all(_is_whole(tile, dim) for dim in chosen):
            raise Unsupported
        if name == "squeeze":
            chosen = [dim for dim in chosen if tile.shape[dim] == 1]
        base_dims = [dim for d in chosen for dim in _dims(tile, d)]
        base_dims = base_dims[0] if isinstance(given, int) and len(base_dims) == 1 else tuple(base_dims)
    if "dim" in kwargs or len(args) <= position:
        kwargs = {**kwargs, "dim": base_dims}
    else:
        args = (*args[:position], base_dims, *args[position + 1 :])
    result = Tile._on_parts(func, (tile.base, *args[1:]), kwargs)
    left = [count for dim, count in enumerate(counts) if dim not in chosen]

    def refold(part: Any) -> Any:
        return fold(part, counts if part.ndim == sum(counts) else left) if isinstance(part, Tile) else part

    return tree_map(refold, result)


def _getitem(tile: Folded, index: Any) -> Any:
    wide: list[Any] = []
    counts, dim = [], 0
    for entry in explicit(index, tile.ndim):
        if entry is None:
            wide.append(None)
            counts.append(1)
            continue
        count = tile.counts[dim]
        if count > 1 and entry != slice(None):
            raise Unsupported
        wide += [entry] * count
        counts += [] if isinstance(entry, int) else [count]
        dim += 1
    return fold(tile.base[tuple(wide)], counts)


def _pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """On the base of the first folded tile, as which the other operands are reshaped."""
    tile = next(t for t in tiles_in((args, kwargs)) if isinstance(t, Folded))
    if is_inplace(func, kwargs):
        target = args[0]
        if not isinstance(target, Folded):
            raise Unsupported("it would write a reshaped tile into another tensor")
        tile = target
    plain_args, plain_kwargs = tree_map(lambda t: _alike(t, tile), (args, kwargs))
    return _refolded(Tile._on_parts(func, plain_args, plain_kwargs), tile)


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
