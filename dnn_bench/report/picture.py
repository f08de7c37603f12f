"""`python -m dnn_bench picture`: measured steps of a saved comparison, one above the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dnn_bench.command_line import one_line_errors, parser, save
from dnn_bench.report.page import load
from scheduler.ir.actions import Action, Kind
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE
from scheduler.render import Panel, compare_svg
from scheduler.simulate.simulator import Event

Entry = dict[str, Any]
NAMES = {"auto": "commsched", "ddp": "PyTorch DDP", "horovod": "Horovod"}


@one_line_errors(ValueError, OSError)
def main(arguments: list[str]) -> int:
    text = "Draws one measured step of each named baseline: rank 0's compute and its communication. "
    given = parser("picture", text + "The report comes from `compare --json`.")
    given.add_argument("report", type=Path, metavar="JSON")
    given.add_argument("--baseline", default="ddp,auto", metavar="A,B", help="from top to bottom")
    given.add_argument("--out", type=Path, required=True, metavar="FILE", help="the SVG to write")
    options = given.parse_args(arguments)
    save(draw(load(options.report), options.baseline.split(",")), options.out)
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
    family, size = re.fullmatch(r"(\w+?)(?:_(\d+)mb)?", entry["name"]).groups()  # type: ignore[union-attr]
    name = NAMES.get(family, family) + (f", {size} MB buckets" if size else "")
    return Panel(f"{name}: {trace['end'] * 1e3:.0f} ms", events(trace), trace["end"])


def events(trace: Entry) -> list[Event]:
    """The trace's spans as events of a program, cut off at both ends of the step.

    DDP says when it issues an all-reduce; it is drawn from when the one before it has ended.
    """
    found = []

    def add(action: Action, lane: str, start: float, end: float) -> None:
        start, end = max(start, 0.0), min(end, trace["end"])
        if end > start:
            found.append(Event(action, lane, 0, start, end))

    for kind, spans in ((Kind.F, trace["forward"]), (Kind.B, trace["backward"])):
        for layer, (start, end) in enumerate(spans):
            add(Action(kind, layer), COMPUTE_LANE, start, end)
    add(Action(Kind.STEP), COMPUTE_LANE, *trace["update"])
    free = 0.0
    for label, start, end, _ in sorted(trace["operations"], key=lambda operation: operation[2]):
        kind = Kind(label[:2])
        add(Action(kind, int(label[2:])), LINK_LANE, max(start, free), end)
        free = end
    return found
