"""Draw timelines: text for a terminal, SVG, and Chrome's trace format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from scheduler.ir.actions import Kind
from scheduler.ir.program import COMPUTE_LANE
from scheduler.simulate.simulator import Event, Result
from scheduler.simulate.task_graph import EVERY_RANK

# -- events by lane, in the order of all pictures ------------------------------------------------------------


def lanes_of(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Group events by lane: each rank's compute, its other lanes, then the lanes that all ranks share.

    With a single rank, lane names have no rank number.
    """
    lanes: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        lanes.setdefault((event.rank, event.lane), []).append(event)
    several = len({rank for rank, _ in lanes if rank != EVERY_RANK}) > 1

    def place(key: tuple[int, str]) -> tuple[bool, int, bool, str]:
        rank, lane = key
        return rank == EVERY_RANK, rank, lane != COMPUTE_LANE, lane

    def name(key: tuple[int, str]) -> str:
        rank, lane = key
        return f"{lane} {rank}" if several and rank != EVERY_RANK else lane

    return {name(key): lanes[key] for key in sorted(lanes, key=place)}


# -- a Gantt chart for a terminal: a line per lane, a column per slice of time -------------------------------

# compute |B3--B2--B1--B0--F0--F1--F2--F3--|
# link    |    RS0-RS1-RS2-AG0-AG1-        |

_FILL, _IDLE = "-", " "


def gantt(result: Result, width: int = 100) -> str:
    """One iteration, ``width`` columns wide. An action too short for its name shows as much of it as fits."""
    if width < 10:
        raise ValueError(f"a chart needs at least 10 columns, got {width}")
    lanes = lanes_of(result.timeline)
    span = max((event.end for event in result.timeline), default=0.0) or 1.0
    head = max(len(name) for name in lanes)
    lines = [f"{name:<{head}} |{_text_line(events, span, width)}|" for name, events in lanes.items()]
    scale = f"0{_seconds(span):>{width - 1}}"
    return "\n".join([*lines, f"{'':<{head}}  {scale}"]) + "\n"


def _text_line(events: list[Event], span: float, width: int) -> str:
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


# -- SVG -----------------------------------------------------------------------------------------------------

LEGEND = {  # colours, and their meaning; other kinds have the colour of STEP
    Kind.F: ("#4c78a8", "F: forward of a layer"),
    Kind.B: ("#f58518", "B: backward of a layer"),
    Kind.W: ("#eeca3b", "W: weight gradient of a layer"),
    Kind.RS: ("#54a24b", "RS: reduce-scatter of a bucket"),
    Kind.AG: ("#e45756", "AG: all-gather of a bucket"),
    Kind.AR: ("#b279a2", "AR: all-reduce of a bucket"),
    Kind.UPDATE: ("#72b7b2", "UPDATE: optimizer update"),
    Kind.STEP: ("#9d9d9d", "STEP: optimizer step"),
}
_ROW, _GAP, _LEFT, _RIGHT, _TOP = 28, 8, 90, 10, 30
_LETTER = 6.5


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture, under its own title. A line marks ``period``, where the next step begins."""

    title: str
    events: Sequence[Event]
    period: float


def svg(result: Result, title: str, width: int = 1200) -> str:
    """One iteration; hover over an action to read its name and times."""
    heading = f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms"
    return compare_svg([Panel(heading, result.timeline, result.period)], title, width)


def compare_svg(panels: Sequence[Panel], title: str, width: int = 1200) -> str:
    """Timelines below each other on one time axis, with a legend."""
    room = width - _LEFT - _RIGHT
    span = max(max([panel.period, *(event.end for event in panel.events)]) for panel in panels) or 1.0
    parts, top = [], _TOP
    for panel in panels:
        lanes = lanes_of(panel.events)
        bottom = top + 24 + len(lanes) * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT}" y="{top + 16}" font-weight="bold">{escape(panel.title)}</text>')
        parts += _lanes(panel.events, top + 24, span, room)
        parts.append(_svg_line(_LEFT + panel.period / span * room, top + 20, bottom, "#333"))
        top = bottom + 12
    kinds = {event.action.kind for panel in panels for event in panel.events}
    parts += _axis(top, span, room)
    parts += _legend([kind for kind in Kind if kind in kinds], top + 46)
    return _document(title, parts, width, top + 60)


def _document(title: str, parts: Sequence[str], width: int, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="sans-serif" font-size="11">'
    )
    white = f'<rect width="{width}" height="{height}" fill="white"/>'
    heading = f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>'
    return "\n".join([head, white, heading, *parts, "</svg>\n"])


def _lanes(events: Sequence[Event], top: int, span: float, room: float) -> list[str]:
    parts = []
    for name, row in lanes_of(events).items():
        parts.append(f'<text x="4" y="{top + 18}">{escape(name)}</text>')
        parts += [_box(event, top, span, room) for event in row]
        top += _ROW + _GAP
    return parts


def _box(event: Event, top: int, span: float, room: float) -> str:
    left = _LEFT + event.start / span * room
    wide = (event.end - event.start) / span * room
    name = escape(event.name)
    colour, _ = _drawn(event.action.kind)
    tip = f"{name}: {event.start * 1e3:.3f} to {event.end * 1e3:.3f} ms"
    label = (
        f'<text x="{left + 3:.2f}" y="{top + 18}" fill="white">{name}</text>'
        if wide > _LETTER * len(name)
        else ""
    )
    return (
        f'<g><title>{tip}</title><rect x="{left:.2f}" y="{top}" width="{max(wide, 0.5):.2f}" height="{_ROW}"'
        f' fill="{colour}" stroke="white" stroke-width="{0.5 if wide > 3 else 0}"/>{label}</g>'
    )


def _drawn(kind: Kind) -> tuple[str, str]:
    return LEGEND.get(kind, (LEGEND[Kind.STEP][0], kind.value))


def _svg_line(x: float, top: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top}" y2="{bottom}" stroke="{colour}"/>'


def _axis(top: int, span: float, room: float) -> list[str]:
    """Ticks at round numbers of milliseconds, at most ten."""
    power: float = 10 ** (len(f"{span * 1e3:.0f}") - 1)
    tick = next(power * f for f in (0.1, 0.2, 0.5, 1.0, 2.0) if span * 1e3 / (power * f) <= 10)
    parts = [f'<line x1="{_LEFT}" x2="{_LEFT + room}" y1="{top}" y2="{top}" stroke="#999"/>']
    for number in range(int(span * 1e3 / tick) + 1):
        x = _LEFT + number * tick / 1e3 / span * room
        label = f"{number * tick:g}" + (" ms" if number == 0 else "")
        parts.append(_svg_line(x, top, top + 5, "#999"))
        parts.append(f'<text x="{x:.2f}" y="{top + 18}" text-anchor="middle" fill="#555">{label}</text>')
    return parts


def _legend(kinds: Sequence[Kind], y: int) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind in kinds:
        colour, text = _drawn(kind)
        parts.append(f'<rect x="{x:.2f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.2f}" y="{y}">{escape(text)}</text>')
        x += 30 + _LETTER * len(text)
    return parts


# -- chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open -----------------------

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
