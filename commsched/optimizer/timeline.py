"""``COMMSCHED_TIMELINE=FILE``: what every rank computed and sent, as one Chrome trace (opens in Perfetto).

Each rank records into ``FILE.rankR`` and, at its exit, rank 0 merges those it finds into ``FILE``. Ranks on
hosts without a common file system leave theirs for ``python -m commsched.optimizer.timeline FILE PART...``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from comm_core import OPS, Traffic, link_gate
from commsched.optimizer.measuring import Watch

_PATIENCE = 10.0  # seconds that rank 0 waits at its exit for the other ranks' parts
_WORTH_SHOWING = 1e-5  # seconds
_LANES = {"compute": 0, "link": 1, "wait": 2, "halo": 3, "activation": 4, "chunks": 5}
_TRAFFIC = {
    Traffic.halo.value: ("halo", "halo"),
    Traffic.activation.value: ("activation", "activation"),
    Traffic.gradient.value: ("chunks", "gradient chunk"),
}


class Timeline:
    """One rank's recording."""

    def __init__(self, file: str, rank: int, size: int) -> None:
        self._file, self._rank, self._size = Path(file), rank, size
        # Engine and watch use this host's monotonic clock; hosts can only be compared by the time of day.
        self._offset = time.time() - time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._part().unlink(missing_ok=True)
        link_gate().record(True)

    def _part(self, rank: int | None = None) -> Path:
        return self._file.with_name(f"{self._file.name}.rank{self._rank if rank is None else rank}")

    def add(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self._rank,
                "tid": _LANES[lane],
                "ts": round((start + self._offset) * 1e6, 3),
                "dur": round(max(0.0, end - start) * 1e6, 3),
                "args": details,
            }
        )

    def add_phases(self, watch: Watch, step: int) -> None:
        """Add one iteration: forward, backward and the step itself."""
        seen = watch.moments()
        marks = seen.marks
        first = seen.forwards[0][1] if seen.forwards else None
        turn = seen.grads[0][1] if seen.grads else marks.get("enter")
        if first is not None and turn is not None:
            self.add("compute", "forward", first, turn, step=step)
        if seen.grads and "backward_end" in marks:
            self.add("compute", "backward", seen.grads[0][1], marks["backward_end"], step=step)
        if {"enter", "end"} <= set(marks):
            self.add("compute", "step()", marks["enter"], marks["end"], step=step)
        for start, end in seen.waits:
            if end - start > _WORTH_SHOWING:
                self.add("wait", "wait", start, end, step=step)

    def add_operations(self, events: Iterable[Any], names: list[str]) -> None:
        """Add the engine's log: each operation with its bucket, its bytes and its wait for the link."""
        for event in events:
            bucket = int(event["bucket"])
            self.add(
                "link",
                f"{OPS[int(event['op'])]}{bucket}",
                float(event["start"]),
                float(event["end"]),
                step=int(event["step"]),
                bucket=names[bucket] if bucket < len(names) else "flags",
                bytes=int(event["bytes"]),
                waited_ms=round((float(event["start"]) - float(event["ready"])) * 1e3, 3),
            )

    def add_messages(self, passages: Iterable[Any]) -> None:
        """Add the messages that passed the link's gate; ``ahead``: more urgent messages in flight then.

        Halos and activations are drawn from start to arrival, chunks of gradients at their start.
        """
        for passage in passages:
            lane, name = _TRAFFIC[int(passage["traffic"])]
            self.add(
                lane,
                name,
                float(passage["start"]),
                float(passage["end"]),
                bytes=int(passage["bytes"]),
                ahead=int(passage["waiting"]),
                waited_ms=round((float(passage["start"]) - float(passage["asked"])) * 1e3, 3),
            )

    def close(self) -> None:
        """Write this rank's part; on rank 0 also the merged file."""
        self.add_messages(link_gate().passages())
        part = self._part()
        unfinished = part.with_suffix(part.suffix + ".tmp")
        unfinished.write_text(json.dumps(self._events))
        unfinished.rename(part)  # rank 0 sees all of it or nothing
        if self._rank == 0:
            wanted = [self._part(rank) for rank in range(self._size)]
            end = time.monotonic() + _PATIENCE
            while time.monotonic() < end and not all(path.exists() for path in wanted):
                time.sleep(0.05)
            there = [path for path in wanted if path.exists()]
            merge(self._file, there)
            if len(there) < len(wanted):
                print(
                    f"commsched: {self._file} holds {len(there)} of {self._size} ranks; merge the others'"
                    f" parts with python -m commsched.optimizer.timeline {self._file} {self._file}.rank*",
                    file=sys.stderr,
                )
            for path in there:
                path.unlink()


def merge(file: Path, parts: Iterable[Path]) -> None:
    """Write one trace of several ranks' parts into ``file``; its times start at the first event."""
    events = [event for part in parts for event in json.loads(part.read_text())]
    start = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - start, 3)
    for rank in sorted({event["pid"] for event in events}):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, number in _LANES.items():
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": lane}}
            )
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print("usage: python -m commsched.optimizer.timeline FILE PART [PART ...]", file=sys.stderr)
        return 2
    merge(Path(arguments[0]), [Path(part) for part in arguments[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
