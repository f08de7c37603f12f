"""The times of the steps since the last plan: their period, their waits, and whether they have drifted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from commsched.backends.interface import Backend
from commsched.optimizer.arrivals import Arrivals

DRIFT = 0.2
SETTLE = 2  # warm-up steps after a new plan, ignored
WINDOW = 15  # steps whose median is compared
PATIENCE = 200  # at least so many steps between two new plans; doubled with every one


@dataclass(frozen=True)
class Measured:
    """Medians over the last steps, in seconds; None before there are any."""

    period: float | None
    exposed: float | None
    utilisation: float | None
    steps: int


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
        self._waits: list[float] = []
        self._baseline: float | None = None
        self._last = time.monotonic()
        self._waited = self._arrivals.waited

    def step(self) -> None:
        now, waited = time.monotonic(), self._arrivals.waited
        self._count += 1
        if self._count > SETTLE:
            self._periods.append(now - self._last)
            self._waits.append(waited - self._waited)
        if len(self._periods) > 4 * WINDOW:
            del self._periods[:WINDOW], self._waits[:WINDOW]
        self._last, self._waited = now, waited
        if self._baseline is None and len(self._periods) == WINDOW:
            self._baseline = median(self._periods)

    def has_drifted(self) -> bool:
        """Return whether the steps became so much slower or faster that the plan's times must be wrong."""
        if self._baseline is None or self._count < self.patience:
            return False
        return abs(median(self._periods[-WINDOW:]) / self._baseline - 1) > DRIFT

    def may_replan_at_once(self) -> bool:
        """Return whether another forward order may start a new plan now.

        The first time it may at once, later only after more and more steps: a model may use another order in
        every step.
        """
        return self._count >= self.patience - PATIENCE

    def measured(self) -> Measured:
        if not self._periods:
            return Measured(None, None, None, 0)
        period = median(self._periods)
        return Measured(period, median(self._waits), self._utilisation(period), len(self._periods))

    def _utilisation(self, period: float) -> float | None:
        events = self._backend.events(clear=False)
        if len(events) == 0:
            return None
        steps = sorted(set(events["step"].tolist()))[-WINDOW - 1 : -1]
        busy = [float((e["end"] - e["start"]).sum()) for e in (events[events["step"] == s] for s in steps)]
        return median(busy) / period if busy else None
