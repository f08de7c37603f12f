"""From many comparisons to the few figures that decide, as Markdown. Pure functions of reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dnn_bench.baselines.registry import AS_THEY_COME
from dnn_bench.command_line import markdown as markdown_table
from dnn_bench.runner.results import ms, shown, to_limit

Report = dict[str, Any]
two = partial(shown, form=".2f")
Figures = dict[str, Any]  # of one baseline, as a report has them


@dataclass(frozen=True)
class Cell:
    """One comparison, seen from one schedule. Speed-ups are other / ours: above 1, ours is faster."""

    report: Report
    schedule: str
    model: str
    hosts: int
    ratio: float  # of communication to compute, as wanted
    rows: dict[str, Figures]  # measured ones, by name

    @property
    def ratio_measured(self) -> float | None:
        wire, local = self.time("wire"), self.time("local")
        return wire / local if wire and local else None

    @property
    def best_peer(self) -> str | None:
        peers = [name for name, row in self.rows.items() if row["kind"] == "peer"]
        return min(peers, key=lambda name: self.rows[name]["time"], default=None)

    def time(self, name: str) -> float | None:
        return self.rows[name]["time"] if name in self.rows else None

    def to_limit(self, bounds: str) -> float | None:
        """Ratio to the larger of the floor and these bounds of the report, one of each repetition."""
        floors, known = self.rows.get("floor", {}).get("times"), self.report.get(bounds)
        return to_limit(self.rows[self.schedule]["times"], floors, known) if floors and known else None

    def over(self, name: str | None) -> float | None:
        """The median over repetitions, so that the machine's drift cancels."""
        if name not in self.rows:
            return None
        # A baseline that was given up has fewer repetitions.
        pairs = zip(self.rows[name]["times"], self.rows[self.schedule]["times"], strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, ratio {self.ratio:g}"


def link_for(ratio: float, compute: float, gradient_bytes: int, hosts: int) -> str:
    """The speed at which an all-reduce of the gradients takes `ratio` times the compute."""
    sent = 2 * (hosts - 1) / hosts * gradient_bytes
    rate = 8 * sent / (ratio * compute)
    return f"{max(1, round(rate / 1e6))}mbit"


def cell_of(report: Report, schedule: str) -> Cell | None:
    """The cell of a report; None where the schedule was not measured."""
    rows = {row["name"]: row for row in report["baselines"] if "time" in row}
    if schedule not in rows:
        return None
    place = report["job"]["model"], report["place"]["ranks"], report["ratio"]
    return Cell(report, schedule, *place, rows)


def means(cells: Sequence[Cell]) -> list[tuple[int, float, int, dict[str, float | None]]]:
    """(hosts, ratio, models, geometric mean over the models by peer), in order."""
    groups: dict[tuple[int, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.hosts, cell.ratio), []).append(cell)
    found = []
    for (hosts, ratio), group in sorted(groups.items()):
        over = {"best peer": _mean([cell.over(cell.best_peer) for cell in group])}
        over |= {name: _mean([cell.over(name) for cell in group]) for name in AS_THEY_COME}
        found.append((hosts, ratio, len(group), over))
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None


def accuracy(cells: Sequence[Cell]) -> list[str]:
    """The worst error of the simulator for each policy, and where."""
    lines = []
    names = dict.fromkeys(name for cell in cells for name, row in cell.rows.items() if row.get("predicted"))
    for name in names:
        errors = [
            (abs(cell.rows[name]["time"] / cell.rows[name]["predicted"] - 1), str(cell))
            for cell in cells
            if cell.rows.get(name, {}).get("predicted")
        ]
        worst, where = max(errors)
        usual = statistics.median(error for error, _ in errors)
        found = f"{worst:.1%} at worst ({where}), {usual:.1%} usually"
        lines.append(f"{name}: measured / predicted is off by {found}")
    return lines


def slowest(cells: Sequence[Cell]) -> str | None:
    """Where the schedule gains least over the best peer."""
    known = [(gain, cell) for cell in cells if (gain := cell.over(cell.best_peer)) is not None]
    if not known:
        return None
    gain, cell = min(known, key=lambda pair: pair[0])
    return f"least gain over the best peer: {gain:.2f} ({cell}, {cell.best_peer})"


Column = tuple[str, Callable[[Cell], str]]  # a header, and the text in a cell's row
PLACE: list[Column] = [
    ("model", lambda cell: cell.model),
    ("hosts", lambda cell: str(cell.hosts)),
    ("ratio", lambda cell: f"{cell.ratio:g}"),
    ("link", lambda cell: ", ".join(sorted(set(cell.report["place"].get("links", ["none"]))))),
]
POLICIES = ("dear", "pipedap", "wfbp")


def markdown(cells: Sequence[Cell]) -> str:
    """Times, ratios, means, and what the simulator's predictions are worth."""
    if not cells:
        return "no cell has been measured yet"
    name = cells[0].schedule
    peers = [f"{peer} / `{name}`" for peer in ("best peer", *(f"`{peer}`" for peer in AS_THEY_COME))]
    header = ["hosts", "ratio", "models", *peers]
    mean_rows = [
        [hosts, f"{ratio:g}", models, *map(two, over.values())] for hosts, ratio, models, over in means(cells)
    ]
    parts = [
        f"Milliseconds per iteration (in brackets: as predicted):\n\n{table(cells, times(name))}",
        f"Ratios (above 1, `{name}` is faster than the peer; limit: the larger of floor and bound):\n\n"
        + table(cells, ratios(name)),
        f"Geometric means over the models:\n\n{markdown_table(header, mean_rows)}",
    ]
    lines = [line for line in [slowest(cells)] if line]
    lines += accuracy(cells)
    lines += [f"{cell}: {doubt}" for cell in cells for doubt in cell.report.get("doubts", ())]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)])


def table(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    header = [name for name, _ in (*PLACE, *columns)]
    return markdown_table(header, [[text(cell) for _, text in (*PLACE, *columns)] for cell in cells])


def times(ours: str) -> list[Column]:
    policies = [ours, *(name for name in POLICIES if name != ours)]
    return [
        ("local", lambda cell: ms(cell.time("local"))),
        ("floor", lambda cell: ms(cell.time("floor"))),
        ("bound, compute alone", lambda cell: ms(cell.report.get("bound"))),
        ("bound, beside traffic", lambda cell: ms(cell.report.get("bound_beside"))),
        *((f"`{name}`", partial(predicted, name=name)) for name in policies),
        (
            "best tuned peer",
            lambda cell: f"{ms(cell.time(best))} `{best}`" if (best := cell.best_peer) else "",
        ),
        *((f"`{name}`", lambda cell, name=name: ms(cell.time(name))) for name in AS_THEY_COME),
    ]


def ratios(ours: str) -> list[Column]:
    return [
        ("communication / compute, measured", lambda cell: two(cell.ratio_measured)),
        (f"`{ours}` / limit, compute alone", lambda cell: two(cell.to_limit("bounds"))),
        (f"`{ours}` / limit, beside traffic", lambda cell: two(cell.to_limit("bounds_beside"))),
        (f"best peer / `{ours}`", lambda cell: two(cell.over(cell.best_peer))),
        *((f"`{name}` / `{ours}`", lambda cell, name=name: two(cell.over(name))) for name in AS_THEY_COME),
    ]


def predicted(cell: Cell, name: str) -> str:
    told = ms(cell.rows.get(name, {}).get("predicted"))
    return ms(cell.time(name)) + (f" ({told})" if told else "")
