"""From many comparisons to the few figures that decide. Pure functions of reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dnn_bench.baselines.registry import AS_THEY_COME
from dnn_bench.runner.results import to_limit

Report = dict[str, Any]
Figures = dict[str, Any]  # of one baseline, as a report has them
RATIOS = (0.5, 1.0, 2.0)  # of reports that do not say what was wanted
BY_THE_SIMULATOR = (("pipedap", "dear"), ("dear", "wfbp"))  # the left one should be faster where it says so


@dataclass(frozen=True)
class Cell:
    """One comparison, seen from one schedule. Speed-ups are other / ours: above 1, ours is faster."""

    model: str
    hosts: int
    ratio: float  # of communication to compute, as wanted
    link: str
    rows: dict[str, Figures]  # measured ones, by name
    bound: float | None  # for the compute alone
    bound_beside: float | None  # for the compute beside the same traffic
    schedule: str
    bounds: tuple[float, ...] = ()  # the same in each repetition
    bounds_beside: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()  # what makes bounds and predictions uncertain

    @property
    def ours(self) -> Figures:
        return self.rows[self.schedule]

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

    def to_limit(self, bounds: Sequence[float]) -> float | None:
        """Ratio to the larger of the floor and these bounds."""
        floors = self.rows["floor"]["times"] if "floor" in self.rows else []
        return to_limit(self.ours["times"], floors, bounds) if floors and bounds else None

    def over(self, name: str | None) -> float | None:
        """The median over repetitions, so that the machine's drift cancels."""
        return statistics.median(self.ratios(name, self.schedule)) if name in self.rows else None

    def ratios(self, one: str | None, other: str) -> list[float]:
        """one / other, repetition by repetition; a baseline that was given up has fewer of them."""
        pairs = zip(self.rows[str(one)]["times"], self.rows[other]["times"], strict=False)
        return [a / b for a, b in pairs]

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
    cell = Cell(
        model=report["job"]["model"],
        hosts=report["place"]["ranks"],
        ratio=report.get("ratio") or float("nan"),
        link=", ".join(sorted(set(report["place"].get("links", ["none"])))),
        rows=rows,
        bound=report.get("bound"),
        bound_beside=report.get("bound_beside"),
        bounds=tuple(report.get("bounds", ())),
        bounds_beside=tuple(report.get("bounds_beside", ())),
        schedule=schedule,
        doubts=tuple(report.get("doubts", ())),
    )
    return cell if report.get("ratio") else _with_ratio(cell)


def _with_ratio(cell: Cell) -> Cell:
    from dataclasses import replace

    measured = cell.ratio_measured
    return replace(cell, ratio=min(RATIOS, key=lambda known: abs(known - (measured or 1.0))))


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


def order_line(cells: Sequence[Cell], first: str, second: str) -> str:
    """Whether the two come in the order of their predictions, where that can be told from noise."""
    judged, wrong, close = 0, [], 0
    for cell in cells:
        faster, slower = (cell.rows.get(name, {}).get("predicted") for name in (first, second))
        if not faster or not slower:
            continue
        gap, measured = slower / faster - 1, cell.ratios(second, first)
        spread = max(measured) - min(measured)
        if abs(gap) <= spread:
            close += 1
            continue
        judged += 1
        found = statistics.median(measured) - 1
        if gap * found <= 0:
            wrong.append(f"{cell}: predicted {gap:+.1%}, measured {found:+.1%}")
    right = f"{judged - len(wrong)} of {judged} cells"
    line = f"{first} and {second} come in the order that the simulator predicts in {right}"
    line += f" ({close} more are too close to tell)" if close else ""
    return f"{line}; not in {'; '.join(wrong)}" if wrong else line


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
