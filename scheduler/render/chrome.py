"""Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from scheduler.render.lanes import lanes_of
from scheduler.simulate.simulator import Result

_MICROSECOND = 1e-6


def chrome_trace(result: Result, process: str = "commsched") -> dict[str, Any]:
    """One iteration as an object for ``json.dump``: a thread for each lane, a complete event ("X") for each
    action.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}]
    for thread, (name, lane) in enumerate(lanes_of(result.timeline).items()):
        events.append({"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}})
        events.append(
            {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        )
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": thread,
                "name": event.name,
                "cat": str(event.action.kind),
                "ts": event.start / _MICROSECOND,
                "dur": (event.end - event.start) / _MICROSECOND,
            }
            for event in lane
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
