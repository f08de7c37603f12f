"""The times of one iteration, from which a profile is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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

    def mapped(self, moved: Callable[[Any], float]) -> Moments:
        """Return the same iteration with every moment moved, without its waits."""
        return Moments(
            [(module, moved(moment)) for module, moment in self.forwards],
            [(param, moved(moment)) for param, moment in self.grads],
            {name: moved(moment) for name, moment in self.marks.items()},
            [],
        )

    def without(self, spans: Sequence[tuple[float, float]]) -> Moments:
        """Return the same iteration on a clock that stops during these spans."""
        return self.mapped(
            lambda moment: moment - sum(min(end, moment) - start for start, end in spans if start < moment)
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
        self.now, self._seconds = now, seconds
        self._marked = Moments([], [], {}, [])

    def forward(self, module: int) -> None:
        self._marked.forwards.append((module, self.now()))

    def grad(self, param: int) -> None:
        self._marked.grads.append((param, self.now()))

    def mark(self, name: str) -> None:
        self._marked.marks[name] = self.now()

    def has(self, name: str) -> bool:
        """Return whether a moment of this name was marked."""
        return name in self._marked.marks

    def wait(self, start: float, end: float) -> None:
        self._marked.waits.append((start, end))

    def moments(self) -> Moments:
        return replace(self._marked.mapped(self._seconds), waits=list(self._marked.waits))

    def compute(self) -> Moments:
        """Return the moments on a clock that stops during waits, if the watch's clock shows waits."""
        seen = self.moments()
        return seen.without(seen.waits) if self.sees_waits else seen
