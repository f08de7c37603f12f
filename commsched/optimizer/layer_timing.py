"""When things happened in one iteration: the raw material of a measured profile."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch


def profiled(name: str) -> AbstractContextManager[object]:
    """A range in torch.profiler's trace, when that is recording; making one otherwise would cost
    microseconds.
    """
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class Watch:
    """Times of one iteration, on the clock that the engine's event log uses."""

    sees_waits = True  # whether the waits for messages are known

    def __init__(self) -> None:
        self.forwards: list[tuple[int, float]] = []
        self.grads: list[tuple[int, float]] = []
        self.marks: dict[str, float] = {}
        self.waits: list[tuple[float, float]] = []

    def forward(self, module: int) -> None:
        self.forwards.append((module, time.monotonic()))

    def grad(self, param: int) -> None:
        self.grads.append((param, time.monotonic()))

    def backward_end(self) -> None:
        self.marks["backward_end"] = time.monotonic()

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic()

    def wait(self, start: float, end: float) -> None:
        self.waits.append((start, end))

    def worked(self) -> Watch:
        """The same iteration on a clock that stands still while something is waited for."""

        def moved(moment: float) -> float:
            return moment - sum(min(end, moment) - start for start, end in self.waits if start < moment)

        found = Watch()
        found.forwards = [(module, moved(moment)) for module, moment in self.forwards]
        found.grads = [(param, moved(moment)) for param, moment in self.grads]
        found.marks = {name: moved(moment) for name, moment in self.marks.items()}
        return found
