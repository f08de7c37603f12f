"""The times of the steps since the last plan: their period, their waits, and whether they have drifted."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from commsched.backends.interface import Backend
from commsched.optimizer.arrivals import Arrivals

DRIFT = 0.2
SETTLE = 2  # warm-up steps after a new plan, ignored
WINDOW = 15  # steps whose median is compared
KEPT = 4 * WINDOW  # steps over which medians are reported
_MOST_MICROSECONDS = 2**31 - 2
NOTICED = 4  # steps whose compute tells whether measuring was disturbed
DISTURBED = 0.1  # computes so much faster than was measured
BRIEF = 0.02  # seconds: shorter iterations differ by more than that from one another
PATIENCE = 200  # at least so many steps between two new plans; doubled with every one


@dataclass(frozen=True)
class Measured:
    """Medians over the last steps, in seconds and bytes; None before there are any.

    ``exposed`` is the time in which the compute waited; on a GPU, the time in which its stream waited.
    ``link_rate``: bytes per second that this rank sent while the link was busy. ``waits``: every rank's
    ``exposed``.
    """

    period: float | None = None
    exposed: float | None = None
    utilisation: float | None = None
    bytes: float | None = None
    link_rate: float | None = None
    waits: tuple[float, ...] = ()
    steps: int = 0


def disturbed(before: float, after: float) -> bool:
    """Return whether the earlier iterations took so much longer that something else had the processor."""
    return before > BRIEF and before > (1 + DISTURBED) * after


class StepTimes:
    """Times every step since the last plan."""

    def __init__(self, arrivals: Arrivals, backend: Backend) -> None:
        self._arrivals, self._backend = arrivals, backend
        self.patience = PATIENCE
        self.restart()

    def restart(self) -> None:
        """Forget all times, because a new plan is installed."""
        self._count = 0
        self._periods: list[float] = []
        self._waits: deque[float] = deque(maxlen=KEPT)
        # The marks of steps that the device may not have finished.
        self._unread: deque[list[tuple[Any, Any]]] = deque()
        self._baseline: float | None = None
        self._compute: float | None = None  # of the first ``NOTICED`` steps
        self._last = time.monotonic()
        self._arrivals.take_waits()
        self._arrivals.waits_of_ranks.clear()

    def step(self) -> None:
        now, waits = time.monotonic(), self._arrivals.take_waits()
        self._count += 1
        if self._count > SETTLE:
            self._periods.append(now - self._last)
            self._unread.append(waits)
            self._read_waits()
        if len(self._periods) > KEPT:
            del self._periods[:WINDOW]
        self._last = now
        if self._baseline is None and len(self._periods) == WINDOW:
            self._baseline = median(self._periods)
        if self._compute is None and len(self._waits) >= NOTICED:
            pairs = zip(self._periods, list(self._waits)[:NOTICED], strict=False)
            self._compute = median(period - waited for period, waited in pairs)

    def _read_waits(self) -> None:
        """Read the waits of all steps that the device has finished, without waiting for it."""
        while self._unread:
            waited = 0.0
            for before, after in self._unread[0]:
                end, start = self._backend.seconds(after), self._backend.seconds(before)
                if end is None or start is None:
                    return
                waited += end - start
            self._waits.append(waited)
            self._unread.popleft()

    def last_wait(self) -> int:
        """Return this rank's entry of ``Arrivals.waits_of_ranks``."""
        return min(int(self._waits[-1] * 1e6), _MOST_MICROSECONDS) + 1 if self._waits else 0

    def has_drifted(self) -> bool:
        """Return whether the steps became so much slower or faster that the plan's times must be wrong."""
        if self._baseline is None or self._count < self.patience:
            return False
        return abs(median(self._periods[-WINDOW:]) / self._baseline - 1) > DRIFT

    def contradicts(self, compute: float) -> bool:
        """Return whether the first steps needed much less compute than was measured."""
        return self._compute is not None and disturbed(compute, self._compute)

    def may_replan_at_once(self) -> bool:
        """Return whether another forward order may start a new plan now.

        The first time it may at once, later only after more and more steps: a model may use another order in
        every step.
        """
        return self._count >= self.patience - PATIENCE

    def measured(self) -> Measured:
        if not self._periods:
            return Measured()
        period, exposed = median(self._periods), median(self._waits) if self._waits else None
        waits = self._waits_of_ranks()
        traffic = self._traffic()
        if not traffic:
            return Measured(period, exposed, waits=waits, steps=len(self._periods))
        busy, size = (median(column) for column in zip(*traffic, strict=True))
        rate = size / busy if busy else None
        return Measured(period, exposed, busy / period, size, rate, waits, len(self._periods))

    def _waits_of_ranks(self) -> tuple[float, ...]:
        rows = [row for row in list(self._arrivals.waits_of_ranks) if all(row)]
        return tuple(median(wait - 1 for wait in column) / 1e6 for column in zip(*rows, strict=True))

    def _traffic(self) -> list[tuple[float, int]]:
        """Return the link's busy seconds and this rank's bytes in each of the last steps."""
        events = self._backend.events(clear=False)
        steps = sorted(set(events["step"].tolist()))[-WINDOW - 1 : -1]
        rows = [events[events["step"] == step] for step in steps]
        return [(float((row["end"] - row["start"]).sum()), int(row["bytes"].sum())) for row in rows]
