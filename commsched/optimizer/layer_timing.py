"""The times of one iteration, from which a profile is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a range in torch.profiler's trace; without a running profiler, a context that costs nothing."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


@dataclass
class Moments:
    """Seconds on the clock of the backend's event log; forwards by module, gradients by parameter."""

    forwards: list[tuple[int, float]]
    grads: list[tuple[int, float]]
    marks: dict[str, float]
    waits: list[tuple[float, float]]

    def without_waits(self) -> Moments:
        """Return the same iteration on a clock that stops during waits."""

        def moved(moment: float) -> float:
            return moment - sum(min(end, moment) - start for start, end in self.waits if start < moment)

        return Moments(
            [(module, moved(moment)) for module, moment in self.forwards],
            [(param, moved(moment)) for param, moment in self.grads],
            {name: moved(moment) for name, moment in self.marks.items()},
            [],
        )


class Watch:
    """Records one iteration. ``now`` marks a moment, ``seconds`` reads a mark once the iteration is over."""

    def __init__(
        self,
        now: Callable[[], Any] = time.monotonic,
        seconds: Callable[[Any], float] = float,
        sees_waits: bool = True,
    ) -> None:
        self.sees_waits = sees_waits  # whether the waits for messages are on the clock of ``now``
        self._now, self._seconds = now, seconds
        self._forwards: list[tuple[int, Any]] = []
        self._grads: list[tuple[int, Any]] = []
        self._marks: dict[str, Any] = {}
        self._waits: list[tuple[float, float]] = []

    def forward(self, module: int) -> None:
        self._forwards.append((module, self._now()))

    def grad(self, param: int) -> None:
        self._grads.append((param, self._now()))

    def mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def wait(self, start: float, end: float) -> None:
        self._waits.append((start, end))

    def moments(self) -> Moments:
        seconds = self._seconds
        return Moments(
            [(module, seconds(mark)) for module, mark in self._forwards],
            [(param, seconds(mark)) for param, mark in self._grads],
            {name: seconds(mark) for name, mark in self._marks.items()},
            list(self._waits),
        )
