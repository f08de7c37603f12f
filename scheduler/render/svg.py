"""The timeline of one iteration as an SVG picture that needs nothing else."""

from __future__ import annotations

from html import escape

from scheduler.ir.actions import Kind
from scheduler.render.lanes import lanes_of
from scheduler.simulate.simulator import Event, Result

COLOURS = {
    Kind.F: "#4c78a8",
    Kind.B: "#f58518",
    Kind.W: "#eeca3b",
    Kind.RS: "#54a24b",
    Kind.AG: "#e45756",
    Kind.AR: "#b279a2",
    Kind.UPDATE: "#72b7b2",
}
_OTHER = "#9d9d9d"
_ROW, _GAP, _LEFT, _TOP = 28, 8, 90, 30
_LETTER = 6.5


def svg(result: Result, width: int = 1200, title: str = "") -> str:
    """Hover over an action to read its name and times."""
    lanes = lanes_of(result.timeline)
    span = max((event.end for event in result.timeline), default=0.0) or 1.0
    height = _TOP + len(lanes) * (_ROW + _GAP) + 20
    heading = title or f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(heading)}</text>',
    ]
    for row, (name, events) in enumerate(lanes.items()):
        top = _TOP + row * (_ROW + _GAP)
        parts.append(f'<text x="4" y="{top + 18}">{escape(name)}</text>')
        parts += [_box(event, top, span, width - _LEFT - 10) for event in events]
    parts.append("</svg>\n")
    return "\n".join(parts)


def _box(event: Event, top: int, span: float, room: float) -> str:
    left = _LEFT + event.start / span * room
    wide = (event.end - event.start) / span * room
    name = escape(event.name)
    colour = COLOURS.get(event.action.kind, _OTHER)
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
