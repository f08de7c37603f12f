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


class Stolen:
    """What share of the processors' time a hypervisor gave to others while a `with` block ran; 0 where the
    system does not tell.
    """

    share = 0.0

    def __enter__(self) -> Stolen:
        self._before = psutil.cpu_times()
        return self

    def __exit__(self, *error: object) -> None:
        after = psutil.cpu_times()
        # What guests of this machine used is part of `user` already.
        kinds = [kind for kind in after._fields if not kind.startswith("guest")]
        total = sum(getattr(after, kind) - getattr(self._before, kind) for kind in kinds)
        stolen = getattr(after, "steal", 0.0) - getattr(self._before, "steal", 0.0)
        self.share = stolen / total if total > 0 else 0.0


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
        with Stolen() as stolen:
            result = measure()
        found.append((result, stolen.share))
    return min(found, key=lambda one: one[1])
