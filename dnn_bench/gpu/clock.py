"""Seconds of an operation, on the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 3


def seconds_of(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the repetitions, after some that do not count."""
    for _ in range(WARM_UP):
        act()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False))
