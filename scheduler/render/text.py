"""A Gantt chart for a terminal: a line per lane, a column per slice of time.

compute |B3--B2--B1--B0--F0--F1--F2--F3--|
link    |    RS0-RS1-RS2-AG0-AG1-        |
"""

from __future__ import annotations

from scheduler.render.lanes import lanes_of
from scheduler.simulate.simulator import Event, Result

_FILL, _IDLE = "-", " "


def gantt(result: Result, width: int = 100) -> str:
    """One iteration, ``width`` columns wide. An action too short for its name shows as much of it as fits."""
    if width < 10:
        raise ValueError(f"a chart needs at least 10 columns, got {width}")
    lanes = lanes_of(result.timeline)
    span = max((event.end for event in result.timeline), default=0.0) or 1.0
    head = max(len(name) for name in lanes)
    lines = [f"{name:<{head}} |{_line(events, span, width)}|" for name, events in lanes.items()]
    scale = f"0{_seconds(span):>{width - 1}}"
    return "\n".join([*lines, f"{'':<{head}}  {scale}"]) + "\n"


def _line(events: list[Event], span: float, width: int) -> str:
    cells = [_IDLE] * width
    for event in events:
        first = min(width - 1, round(event.start / span * width))
        last = max(first + 1, round(event.end / span * width))
        label = event.name[: last - first].ljust(last - first, _FILL)
        cells[first:last] = label
    return "".join(cells)[:width]


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"
