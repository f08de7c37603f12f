"""A recording of this rank's operations for chrome://tracing, with the event names Horovod's timeline has."""

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
        self._events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
            {
                "name": "clock",
                "ph": "M",
                "pid": rank,
                "args": {"start_time_since_epoch_in_micros": int(time.time() * 1e6)},
            },
        ]

    def operation(self, name: str, kind: str, submitted: float, started: float, ended: float) -> None:
        """One finished operation: waiting for the other ranks, then running. Times are
        ``time.monotonic()``."""
        with self._lock:
            lane = self._lane(name)
            for label, begin, end in (
                (f"NEGOTIATE_{kind.upper()}", submitted, started),
                (kind.upper(), started, ended),
            ):
                # What was submitted before the recording began is cut off at its start.
                begin = max(begin, self._start)
                self._events.append(
                    {
                        "name": label,
                        "ph": "X",
                        "pid": self._rank,
                        "tid": lane,
                        "ts": self._micros(begin),
                        "dur": max(0.0, round((end - begin) * 1e6, 3)),
                    }
                )
            if self._mark_cycles:
                self._events.append(
                    {
                        "name": "CYCLE_START",
                        "ph": "i",
                        "pid": self._rank,
                        "ts": self._micros(started),
                        "s": "p",
                    }
                )

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": self._rank,
                    "tid": self._lanes[name],
                    "args": {"name": name},
                }
            )
        return self._lanes[name]

    def _micros(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 3)

    def close(self) -> None:
        """Write the file."""
        with self._lock:
            self._path.write_text(json.dumps(self._events, indent=0))
