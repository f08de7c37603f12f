"""A recording of this rank's operations for chrome://tracing, with the event names of Horovod's timeline."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class Timeline:
    """Collects events and writes them as one JSON list when closed."""

    def __init__(self, path: str, rank: int, mark_cycles: bool) -> None:
        self._path, self._rank, self._mark_cycles = Path(path), rank, mark_cycles
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._lanes: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._add("process_name", "M", args={"name": f"rank {rank}"})
        self._add("clock", "M", args={"start_time_since_epoch_in_micros": int(time.time() * 1e6)})

    def operation(self, name: str, kind: str, submitted: float, started: float, ended: float) -> None:
        """Record one finished operation: its wait for the other ranks, then its run.

        Times are ``time.monotonic()``. Operations submitted before the recording began are cut at its start.
        """
        with self._lock:
            lane = self._lane(name)
            for label, begin, end in (
                (f"NEGOTIATE_{kind.upper()}", max(submitted, self._start), started),
                (kind.upper(), max(started, self._start), ended),
            ):
                duration = max(0.0, round((end - begin) * 1e6, 3))
                self._add(label, "X", tid=lane, ts=self._micros(begin), dur=duration)
            if self._mark_cycles:
                self._add("CYCLE_START", "i", ts=self._micros(started), s="p")

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._add("thread_name", "M", tid=self._lanes[name], args={"name": name})
        return self._lanes[name]

    def _add(self, name: str, phase: str, **more: Any) -> None:
        self._events.append({"name": name, "ph": phase, "pid": self._rank, **more})

    def _micros(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 3)

    def close(self) -> None:
        """Write the file."""
        with self._lock:
            self._path.write_text(json.dumps(self._events, indent=0))
