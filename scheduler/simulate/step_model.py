"""The period of a data-parallel step for searches, which evaluate thousands of orders.

Between two iterations a data-parallel step is at rest: the last forward has waited for every bucket, so
no message is in flight. So one pass over one iteration gives the exact steady state. A test compares it with
the event simulator, which is slower because it runs programs of every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile

if TYPE_CHECKING:
    from scheduler.simulate.kernels import Load, Step

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
        self.forward = np.array([layer.forward for layer in profile.layers])
        # By layer: the seconds from the begin of the backward until it has made the layer's gradient.
        self.ready = np.cumsum([layer.backward for layer in reversed(profile.layers)])[::-1]
        self.backward = float(self.ready[0])
        needed = profile.needed
        self.layer = np.array([min(needed[la] for la in bucket.layers) for bucket in buckets], np.int64)
        self.complete = self.ready[np.array([bucket.ready_layer for bucket in buckets], np.int64)]
        times = [link.times(Kind.RS, bytes_) for bytes_ in size]
        self.cost = np.array([each.link for each in times], float)
        self.inside = np.array([each.before for each in times], float)
        self.update_in_compute = gather == "gradients"
        self.update = profile.update_per_byte * size / (1 if self.update_in_compute else ranks)
        self.gathers_late = not self.update_in_compute and not early_step

    def encode(self, actions: Iterable[Action]) -> np.ndarray:
        codes = [_CODES.index(action.kind) * self.count + action.index for action in actions]
        return np.array(codes, np.int64)

    def decode(self, order: Iterable[int]) -> tuple[Action, ...]:
        return tuple(Action(_CODES[int(code) // self.count], int(code) % self.count) for code in order)

    def kernel_input(self) -> tuple[Step, Load]:
        """Return the arguments of the compiled functions."""
        from scheduler.simulate.kernels import Load, Step

        update_from = self.backward if self.gathers_late else 0.0
        step = Step(self.forward, self.backward, self.update_in_compute, update_from, self.gathers_late)
        return step, Load(self.complete, self.layer, self.cost, self.update, self.inside)

    def period(self, order: np.ndarray) -> float:
        """Return the seconds per iteration; ``order``: each bucket's RS before its AG, or its AR, once."""
        from scheduler.simulate.kernels import step_period

        return float(step_period(*self.kernel_input(), order))
