"""`python -m dnn_bench report`: a page from saved comparisons; `picture`: some of their steps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dnn_bench.command_line import one_line_errors, parser, save
from scheduler.ir.actions import Action, Kind
from scheduler.ir.inputs import LARGEST, InputError, read_json, reading
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE
from scheduler.render import Panel, compare_svg
from scheduler.simulate.simulator import Event

SCRIPTS = ("draw.js", "charts.js", "timeline.js", "page.js")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


@one_line_errors(ValueError, OSError)
def main(arguments: list[str]) -> int:
    text = "Makes one HTML page of the JSON files that compare wrote. "
    text += "Files of the same model with different numbers of ranks give scaling curves."
    command = parser("report", text)
    command.add_argument("reports", nargs="+", type=Path, metavar="JSON")
    command.add_argument("--html", type=Path, required=True, metavar="FILE", help="the page to write")
    options = command.parse_args(arguments)
    reports = [load(path) for path in options.reports]
    with reading(", ".join(map(str, options.reports))):
        text = render(reports)
    save(text, options.html)
    return 0


def load(path: Path) -> dict[str, Any]:
    """A report, checked to be one."""
    report: Any = read_json(path)
    if not isinstance(report, dict) or report.get("kind") != "compare":
        raise InputError(f"{path} is no report of dnn_bench compare: it has no kind 'compare'")
    return report


def render(reports: Sequence[dict[str, Any]]) -> str:
    """One page for one or several comparisons; several of one model also give its scaling curves."""
    if not reports:
        raise ValueError("a page needs at least one report")
    here = files("dnn_bench.report")
    script = "\n".join((here / name).read_text() for name in SCRIPTS)
    models = ", ".join(dict.fromkeys(report["job"]["model"] for report in reports))
    # In a script element only "</" could end the data early.
    data = json.dumps(list(reports)).replace("</", "<\\/")
    style = (here / "page.css").read_text()
    return PAGE.format(title=f"dnn_bench: {models}", style=style, data=data, script=script)


# -- measured steps of a saved comparison, one above the other -----------------------------------------------

Entry = dict[str, Any]
NAMES = {"auto": "commsched", "ddp": "PyTorch DDP", "horovod": "Horovod"}


@one_line_errors(ValueError, OSError)
def picture(arguments: list[str]) -> int:
    text = "Draws one measured step of each named baseline: rank 0's compute and its communication. "
    command = parser("picture", text + "The report comes from `compare --json`.")
    command.add_argument("report", type=Path, metavar="JSON")
    command.add_argument("--baseline", default="ddp,auto", metavar="A,B", help="from top to bottom")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the SVG to write")
    options = command.parse_args(arguments)
    with reading(options.report):
        text = draw(load(options.report), options.baseline.split(","))
    save(text, options.out)
    return 0


def draw(report: Entry, names: list[str]) -> str:
    entries = {entry["name"]: entry for entry in report["baselines"] if entry["trace"]}
    for name in names:
        if name not in entries:
            raise ValueError(
                f"the report has no timeline of {name!r}, only of: {', '.join(entries) or 'none'};"
                " run compare without --no-trace"
            )
    place = report["place"]
    link = f", link {place['links'][0]}" if place.get("links") else ""
    job = f"{report['job']['model']} on {place['ranks']} ranks{link}"
    title = f"One training step of {job}, measured on rank 0 (white in a compute row: waiting)"
    return compare_svg([panel(entries[name]) for name in names], title)


def panel(entry: Entry) -> Panel:
    trace = entry["trace"]
    if not 0 < trace["end"] <= LARGEST:
        raise InputError(f"{entry['name']}: a step takes 0 to {LARGEST:,} s, not {trace['end']}")
    family, size = re.fullmatch(r"(\w+?)(?:_(\d+)mb)?", entry["name"]).groups()  # type: ignore[union-attr]
    name = NAMES.get(family, family) + (f", {size} MB buckets" if size else "")
    return Panel(f"{name}: {trace['end'] * 1e3:.0f} ms", events(trace), trace["end"])


def events(trace: Entry) -> list[Event]:
    """The trace's spans as events of a program, cut off at both ends of the step.

    DDP says when it issues an all-reduce; it is drawn from when the one before it has ended.
    """
    drawn = []

    def add(action: Action, lane: str, start: float, end: float) -> None:
        start, end = max(start, 0.0), min(end, trace["end"])
        if end > start:
            drawn.append(Event(action, lane, 0, start, end))

    for kind, spans in ((Kind.F, trace["forward"]), (Kind.B, trace["backward"])):
        for layer, (start, end) in enumerate(spans):
            add(Action(kind, layer), COMPUTE_LANE, start, end)
    add(Action(Kind.STEP), COMPUTE_LANE, *trace["update"])
    free = 0.0
    for label, start, end, _ in sorted(trace["operations"], key=lambda operation: operation[2]):
        kind = Kind(label[:2])
        add(Action(kind, int(label[2:])), LINK_LANE, max(start, free), end)
        free = end
    return drawn
