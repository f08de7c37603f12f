"""The machine and the versions a report was made with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

PACKAGES = ("torch", "horovod", "numpy", "numba", "commsched")
DISTURBED = 0.05  # of the processors' time taken by others, beyond which a measurement is taken again
T = TypeVar("T")


def describe() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["python -m dnn_bench", *sys.argv[1:]]),
        "processor": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
    }


def stolen_share(before: Any, after: Any) -> float:
    """The share of the processors' time that a hypervisor gave to others between two readings of
    `psutil.cpu_times`; 0 where the system does not tell.
    """
    # What guests of this machine used is part of `user` already.
    spent = {
        kind: getattr(after, kind) - getattr(before, kind)
        for kind in after._fields
        if not kind.startswith("guest")
    }
    total = sum(spent.values())
    return spent.get("steal", 0.0) / total if total > 0 else 0.0


def least_disturbed(
    measure: Callable[[], T], tries: int, again: Callable[[float], None] = lambda share: None
) -> tuple[T, float]:
    """What `measure` returns, and the share that was stolen meanwhile: of the first try that others left
    alone, or of the least disturbed one. Which one counts depends on what was stolen, never on what was
    measured. `again` is told the share before each further try.
    """
    found: list[tuple[T, float]] = []
    while len(found) < tries and (not found or found[-1][1] > DISTURBED):
        if found:
            again(found[-1][1])
        before = psutil.cpu_times()
        result = measure()
        found.append((result, stolen_share(before, psutil.cpu_times())))
    return min(found, key=lambda one: one[1])
