"""Which rows of a batch belong to which micro-batch and which replica, and pytrees of tensors cut by rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from scheduler.ir.layout import Layout

Range = tuple[int, int]


def border(number: int, rows: int, parts: int) -> int:
    """The first row of part ``number`` of ``rows`` rows; every rank rounds in the same way."""
    return number * rows // parts


def rows_of(tree: Any, what: str) -> int:
    """The first dimension that all tensors of a batch share."""
    found = {leaf.shape[0] if leaf.dim() else None for leaf in tensors(tree)}
    if len(found) != 1 or None in found:
        raise ValueError(
            f"the tensors of {what} must all have the same number of rows (their first dimension), got"
            f" {sorted(map(str, found))}"
        )
    return int(found.pop())  # type: ignore[arg-type]


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):  # as in most batches, every step
        return [leaf for part in tree for leaf in tensors(part)]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def cut(tree: Any, rows: Range) -> Any:
    """The same rows of every tensor."""
    if isinstance(tree, Tensor):
        return tree[rows[0] : rows[1]]
    return tree_map(lambda leaf: leaf[rows[0] : rows[1]] if isinstance(leaf, Tensor) else leaf, tree)


def shape_key(tree: Any) -> Hashable:
    """A key that is equal for two batches whose shapes differ in the number of rows alone."""
    return tuple((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in tensors(tree))


@dataclass(frozen=True)
class Share:
    """The rows of one optimizer step: ``rows`` in ``parts`` micro-batches. ``mine``: those that this rank was
    given; None: all.
    """

    rows: int
    parts: int
    key: Hashable
    mine: tuple[Range, ...] | None = None

    def _micro(self, index: int) -> Range:
        return border(index, self.rows, self.parts), border(index + 1, self.rows, self.parts)

    def size(self, index: int) -> int:
        """Rows of a micro-batch on all replicas."""
        low, high = self._micro(index)
        return high - low

    def within(self, index: int, replica: int, replicas: int) -> Range:
        """The rows of a micro-batch that a replica holds, counted from the micro-batch's first."""
        return _within(self.size(index), replica, replicas)

    def given(self, index: int, replica: int, replicas: int) -> Range:
        """The same rows, counted in the batch that this rank was given."""
        low, _ = self._micro(index)
        first, last = self.within(index, replica, replicas)
        if self.mine is not None:
            before = size_of(part for part in self.mine if part[1] <= low + first)
            return before, before + last - first
        return low + first, low + last

    def check(self, replicas: int) -> None:
        """Every replica needs a row of every micro-batch."""
        smallest = min(self.size(index) for index in range(self.parts))
        if smallest < replicas:
            raise ValueError(
                f"every replica needs at least 1 row of every micro-batch; {self.rows} rows in {self.parts}"
                f" micro-batches leave {smallest} for {replicas} replicas; use a larger batch or fewer"
                " micro-batches"
            )


def held(rows: int, layout: Layout, stage: int, rank: int) -> tuple[Range, ...]:
    """The rows of a step that a rank of ``stage`` holds, micro-batch by micro-batch."""
    share = Share(rows, layout.microbatches, None)
    replicas = layout.replicas(stage)
    places = [(index, layout.place(stage, rank, index)[0]) for index in layout.computed_by(rank, stage)]
    return tuple(share.given(index, replica, replicas) for index, replica in places)


def size_of(parts: Iterable[Range]) -> int:
    """How many rows these are."""
    return sum(high - low for low, high in parts)


@lru_cache(maxsize=1 << 12)
def _within(size: int, replica: int, replicas: int) -> Range:
    return border(replica, size, replicas), border(replica + 1, size, replicas)
