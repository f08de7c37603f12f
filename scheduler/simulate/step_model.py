"""The period of a data-parallel step for searches, which evaluate thousands of orders.

Between two iterations a data-parallel step is at rest: the last forward has waited for every bucket, so
no message is in flight. So one pass over one iteration gives the exact steady state. A test compares it with
the event simulator, which is slower because it runs programs of every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile

_CODES = (Kind.RS, Kind.AG, Kind.AR)


class StepModel:
    """Orders of communication of one set of buckets, as arrays of codes: ``b`` is RS, ``n + b`` AG, ``2n +
    b`` AR of bucket b.
    """

    def __init__(
        self,
        profile: Profile,
        link: Link,
        buckets: Sequence[Bucket],
        *,
        ranks: int = 2,
        gather: str = "gradients",
        early_step: bool = False,
    ) -> None:
        self.count = len(buckets)
        size = np.array([bucket.bytes for bucket in buckets], float)
        backward = np.array([layer.backward for layer in profile.layers])
        self.forward = np.array([layer.forward for layer in profile.layers])
        self.backward_end = np.cumsum(backward[::-1])[::-1].copy()
        self.ready = np.array([bucket.ready_layer for bucket in buckets], np.int64)
        self.due = np.array([bucket.due_layer for bucket in buckets], np.int64)
        self.cost = np.array([link.cost(Kind.RS, bytes_) for bytes_ in size])
        self.update_in_compute = gather == "gradients"
        self.update = profile.update_per_byte * size / (1 if self.update_in_compute else ranks)
        waits = not self.update_in_compute and not early_step
        self.update_from = float(self.backward_end[0]) if waits else 0.0

    def encode(self, actions: Iterable[Action]) -> np.ndarray:
        codes = [_CODES.index(action.kind) * self.count + action.index for action in actions]
        return np.array(codes, np.int64)

    def decode(self, order: Iterable[int]) -> tuple[Action, ...]:
        return tuple(Action(_CODES[int(code) // self.count], int(code) % self.count) for code in order)

    def period(self, order: np.ndarray) -> float:
        """Seconds per iteration; ``order`` must hold each bucket's RS before its AG, or its AR, once."""
        from scheduler.simulate.step_kernel import step_period

        return float(
            step_period(
                self.forward,
                self.backward_end,
                self.ready,
                self.due,
                self.cost,
                self.update,
                order,
                self.update_in_compute,
                self.update_from,
            )
        )
