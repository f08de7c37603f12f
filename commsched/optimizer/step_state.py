"""What is known of one round: which slots are filled, which buckets are sent and done, what the ranks'
flags said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commsched.optimizer.bucket_layout import Layout

# A parameter's entry in the flags that every round sums over the ranks.
DENSE = 1
SPARSE = 1 << 10
LATE = 1 << 20


@dataclass(slots=True)
class Kept:
    """A sum over the ranks in ``p.grad``: a further backward adds to it, and only what is new is summed."""

    shown: torch.Tensor
    version: int
    sparse: torch.Tensor | None  # the sum itself, where no slot holds it

    @classmethod
    def of(cls, shown: torch.Tensor) -> Kept:
        return cls(shown, shown._version, shown.clone() if shown.is_sparse else None)


class Round:
    """The counters of one reduction of all buckets."""

    def __init__(self, layout: Layout, params: int) -> None:
        buckets = len(layout.slices)
        self.filled = [False] * params
        self.exposed = [i not in layout.slots for i in range(params)]
        self.missing = [len(piece.params) for piece in layout.slices]
        self.sent = [False] * buckets
        self.done = [False] * buckets
        self.used: list[int] | None = None
        self.sparse: dict[int, torch.Tensor] = {}
        self.late: dict[int, torch.Tensor] = {}

    @classmethod
    def finished(cls, layout: Layout, params: int) -> Round:
        """A round that is over: nothing is on its way."""
        over = cls(layout, params)
        over.exposed = [True] * params
        over.sent = over.done = [True] * len(layout.slices)
        over.used = [0] * (params + 1)
        return over

    def count_down(self, buckets: Sequence[int]) -> list[int]:
        """One slot of each of these buckets is filled; returns those that are now complete."""
        complete = []
        for bucket in buckets:
            self.missing[bucket] -= 1
            if self.missing[bucket] == 0:
                complete.append(bucket)
        return complete

    def add_late(self, i: int, grad: torch.Tensor) -> None:
        self.late[i] = self.late[i] + grad if i in self.late else grad
