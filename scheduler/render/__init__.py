"""Draw timelines: text for a terminal, SVG, and Chrome's trace format."""

from __future__ import annotations

from scheduler.render.chrome import chrome_trace
from scheduler.render.svg import Panel, compare_svg, svg
from scheduler.render.text import gantt

__all__ = ["Panel", "chrome_trace", "compare_svg", "gantt", "svg"]
