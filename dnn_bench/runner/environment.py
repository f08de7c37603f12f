"""The machine and the versions a report was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "horovod", "numpy", "numba", "commsched")


def describe() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["python -m dnn_bench", *sys.argv[1:]]),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(),
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


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
