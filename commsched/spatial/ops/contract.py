"""Matrix products and attention: rows (queries) and batches (windows) stay cut; what is summed over (keys and
values) is gathered.

Dimensions have letters, as in ``einsum``. A dimension of a folded tile consists of several factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from commsched.spatial.folded import Folded, counts_of, fold, gathered, gathered_tiles, unfolded
from commsched.spatial.intervals import Split
from commsched.spatial.layout import enter, recut, replicate, trimmed
from commsched.spatial.tile import HANDLERS, Cut, Tile, handles, tiles_in, tree_map, unsupported

_T = torch.Tensor
_BATCH = "ZYXWVUTSRQPONM"
CONTRACTIONS: dict[Any, Callable[..., Any]] = {}


class _Place(NamedTuple):
    """Where a mesh axis cuts: the dimension's letter, which of its factors, and how."""

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
                if place is not None and place.letter in kept and self.places[axis] is None:
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


def _otherwise(func: Any, args: tuple, options: dict, why: str) -> Any:
    """On gathered tokens; image dimensions that are still apart are not gathered unasked."""
    if any(isinstance(tile, Folded) for tile in tiles_in(args)):
        return func(*gathered_tiles(args), **options)
    return unsupported(func, args, options, why)


def _batch(ndim: int, inner: str) -> str:
    """Letters for ``ndim`` dimensions of which the last have the letters ``inner``."""
    return _BATCH[: ndim - len(inner)][::-1] + inner


@_register(torch.matmul, _T.matmul, _T.__matmul__, torch.bmm, _T.bmm)
def matmul(input: Any, other: Any) -> Any:
    """Rows of ``input`` and batches stay cut; columns of ``other`` too if nothing else is."""
    if input.ndim < 2 or other.ndim < 2:
        return _otherwise(torch.matmul, (input, other), {}, "a product with a vector")
    out = _batch(max(input.ndim, other.ndim), "ij")
    return _contract(torch.matmul, (_batch(input.ndim, "ik"), _batch(other.ndim, "kj")), out, (input, other))


@_register(torch.einsum)
def einsum(equation: Any, *operands: Any) -> Any:
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    plain = equation.replace(" ", "") if isinstance(equation, str) else ""
    inputs, arrow, out = plain.partition("->")
    letters = inputs.split(",")
    if not arrow or "." in plain or any(len(set(own)) != len(own) for own in letters):
        return _otherwise(torch.einsum, (equation, *operands), {}, "only letters, each once, and an arrow")
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
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        return unsupported(
            F.scaled_dot_product_attention,
            arguments,
            {},
            "is_causal, enable_gqa or dropout_p on split tokens",
        )
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
