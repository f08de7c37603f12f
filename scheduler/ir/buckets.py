"""Buckets: which bytes of which layers travel together.

A bucket is a tuple of pieces; a piece is a byte range of one layer's gradient. A layer larger than a part is
split into several pieces, which may stand in different buckets. Buckets are numbered in the order in which
the backward fills them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from scheduler.ir.codec import decode, register

MIB = 2**20

ALIGNMENT = 64
"""Tensors are split at multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, stop)`` of the gradient of layer ``layer``."""

    layer: int
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


register(
    Piece,
    lambda piece: [piece.layer, piece.start, piece.stop],
    lambda row: Piece(*decode(row, tuple[int, int, int], "layer, start and stop")),
)


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel in one message; ``group`` keeps apart what cannot share one (dtype, group)."""

    pieces: tuple[Piece, ...]
    group: int = 0

    # Searches ask for these again and again.
    @cached_property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers with bytes here, in forward order, each once."""
        return tuple(sorted({piece.layer for piece in self.pieces}))

    @cached_property
    def ready_layer(self) -> int:
        """The layer whose backward completes this bucket, and whose forward needs it first."""
        return min(piece.layer for piece in self.pieces)


def fuse_by_bytes(
    sizes: Sequence[int],
    limit: float,
    first: float | None = None,
    part: float | None = None,
    groups: Sequence[int] | None = None,
) -> tuple[Bucket, ...]:
    """Buckets in backward order, closed once they hold ``limit`` bytes (the first one ``first`` bytes).

    Layers larger than ``part`` (default: never) are split into parts of about equal size, cut at multiples of
    ``ALIGNMENT``. Layers without bytes are in no bucket. ``groups`` gives the group of each layer; one bucket
    holds one group.
    """
    if limit <= 0 or (first is not None and first <= 0) or (part is not None and part <= 0):
        raise ValueError(f"bucket sizes must be positive, got limit={limit}, first={first}, part={part}")
    return _fuse(tuple(sizes), limit, first, part, None if groups is None else tuple(groups))


@lru_cache(maxsize=256)
def _fuse(
    sizes: tuple[int, ...],
    limit: float,
    first: float | None,
    part: float | None,
    groups: tuple[int, ...] | None,
) -> tuple[Bucket, ...]:
    # Cached: every policy tries the same sizes, and a scaling table asks them all again for every row.
    closed: list[Bucket] = []
    filling: dict[int, list[Piece]] = {}
    filled: dict[int, int] = {}
    for piece in _backward_pieces(sizes, part):
        group = groups[piece.layer] if groups is not None else 0
        filling.setdefault(group, []).append(piece)
        filled[group] = filled.get(group, 0) + piece.bytes
        if filled[group] >= (first if first is not None and not closed else limit):
            closed.append(Bucket(tuple(filling.pop(group)), group))
            filled[group] = 0
    closed += [Bucket(tuple(pieces), group) for group, pieces in filling.items()]
    return in_backward_order(closed)


def one_per_layer(sizes: Sequence[int], groups: Sequence[int] | None = None) -> tuple[Bucket, ...]:
    """One bucket for each layer with bytes, in backward order."""
    return fuse_by_bytes(sizes, 1, groups=groups)


def in_backward_order(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets as the backward completes them; those of one layer stay in the order given."""
    return tuple(sorted(buckets, key=lambda bucket: -bucket.ready_layer))


def _backward_pieces(sizes: Sequence[int], part: float | None) -> Iterable[Piece]:
    for layer in reversed(range(len(sizes))):
        size = int(sizes[layer])
        count = 1 if part is None else max(1, math.ceil(size / part))
        bounds = [align(size * i // count) for i in range(count)] + [size]
        for start, stop in pairwise(bounds):
            if stop > start:
                yield Piece(layer, start, stop)


def align(offset: float) -> int:
    """The nearest offset below at which a gradient may be cut: never inside an element."""
    return int(offset) // ALIGNMENT * ALIGNMENT


def check_cover(buckets: Sequence[Bucket], sizes: Sequence[int], groups: Sequence[int] | None = None) -> None:
    """Every gradient byte stands in exactly one bucket, or a ``ValueError`` says which does not."""
    by_layer: dict[int, list[Piece]] = {}
    for number, bucket in enumerate(buckets):
        if not bucket.pieces:
            raise ValueError(f"bucket {number} is empty; every bucket must hold at least one piece")
        for piece in bucket.pieces:
            if not 0 <= piece.layer < len(sizes):
                raise ValueError(
                    f"bucket {number} names layer {piece.layer}; the profile has {len(sizes)} layers"
                )
            if groups is not None and groups[piece.layer] != bucket.group:
                raise ValueError(
                    f"bucket {number} is of group {bucket.group} and holds layer {piece.layer} of group"
                    f" {groups[piece.layer]}; one bucket holds one group"
                )
            by_layer.setdefault(piece.layer, []).append(piece)
    for layer, size in enumerate(sizes):
        reached = 0
        for piece in sorted(by_layer.get(layer, []), key=lambda p: p.start):
            if piece.start != reached or piece.stop <= piece.start:
                what = "twice" if piece.start < reached else "in no bucket"
                raise ValueError(
                    f"bytes {min(reached, piece.start)}..{max(reached, piece.start)} of layer {layer} stand"
                    f" {what}; every gradient byte must stand in exactly one bucket"
                )
            reached = piece.stop
        if reached != size:
            raise ValueError(
                f"buckets cover {reached} of the {size} bytes of layer {layer};"
                " they must cover each exactly once"
            )
