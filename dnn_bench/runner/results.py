"""From raw measurements to figures: medians, ratios, shares; and their table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dnn_bench import models
from dnn_bench.baselines.registry import LIMIT
from dnn_bench.command_line import console, table
from dnn_bench.runner.environment import DISTURBED

OK, WRONG, FAILED, MISSING = "ok", "wrong", "failed", "missing"
Block = dict[str, Any]


@dataclass
class Row:
    """One baseline's raw results; `repetitions` holds, per repetition, each rank's block."""

    name: str
    kind: str
    status: str = OK
    reason: str = ""
    error: float | None = None  # of the first steps, relative to one process
    repetitions: list[list[Block]] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)  # share of the processors' time, per repetition
    predicted: float | None = None
    trace: dict[str, Any] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # to fields of the job

    @property
    def times(self) -> list[float]:
        """Seconds per iteration, one figure per repetition.

        Ranks that exchange gradients keep step, and their mean is the steadiest figure. The ranks of a limit
        do not wait for each other: a job is as fast as the slowest of them.
        """
        whole = max if self.kind == LIMIT else statistics.mean
        return [whole(ranks) for ranks in self.by_rank]

    @property
    def by_rank(self) -> list[list[float]]:
        """Each rank's mean over its iterations, per repetition."""
        return [[statistics.mean(block["iterations"]) for block in blocks] for blocks in self.repetitions]

    def mean(self, name: str) -> float:
        """A figure's mean over ranks and repetitions."""
        return statistics.mean(block[name] for blocks in self.repetitions for block in blocks)

    @property
    def recorded(self) -> bool:
        """Whether its communication was recorded."""
        return self.trace is not None and bool(self.trace["operations"])

    @property
    def measured(self) -> bool:
        return self.status == OK and bool(self.repetitions)


def summarise(
    rows: Sequence[Row], *, samples: int, bounds: Sequence[float], rate: float | None
) -> list[dict[str, Any]]:
    """Figures per row; `samples` is the global batch, `bounds` the lower bound in each repetition, `rate` a
    link's bytes per second.
    """
    by_name = {row.name: row for row in rows if row.measured}
    local, floor = by_name.get("local"), by_name.get("floor")
    best = fastest(rows, "peer")
    kept = ("name", "kind", "status", "reason", "error", "predicted", "trace", "changes")
    found = [{name: getattr(row, name) for name in kept} for row in rows]
    for row, figures in zip(rows, found, strict=True):
        if not row.measured:
            continue
        time = statistics.median(row.times)
        figures |= {
            "time": time,
            "low": min(row.times),
            "high": max(row.times),
            "times": row.times,
            "by_rank": row.by_rank,
            "stolen": row.stolen,
            "throughput": None if row.name == "wire" else samples / time,
            "throughputs": [samples / value for value in row.times],
            **{name: row.mean(name) for name in ("forward", "backward", "step", "cpu", "sent")},
            "memory": max(block["memory"] for blocks in row.repetitions for block in blocks),
            "utilisation": row.mean("sent") / rate / time if rate else None,
            **split(row, local, floor),
            "to_floor": paired_ratio(row, floor),
            "to_limit": to_limit(row.times, floor.times if floor else [], bounds),
            "to_best_peer": paired_ratio(row, best),
            "best_peer": best.name if best else None,
        }
        if local is not None and row is not local:
            compute = 0.0 if row.name == "wire" else local.mean("cpu")
            figures["communication_cpu"] = figures["cpu"] - compute
    return found


def fastest(rows: Sequence[Row], kind: str) -> Row | None:
    """The row of this kind with the smallest median."""
    # One with a cheaper optimizer is no measure for the others.
    candidates = [row for row in rows if row.kind == kind and row.measured and not row.changes]
    return min(candidates, key=lambda row: statistics.median(row.times), default=None)


def split(row: Row, local: Row | None, floor: Row | None) -> dict[str, float | None]:
    """The time as compute, overhead (what moving the bytes costs the compute) and exposed communication."""
    if local is None or row.name == "wire":
        return {"compute": None, "overhead": None, "exposed": None}
    time, compute = statistics.median(row.times), statistics.median(local.times)
    contention = 0.0 if floor is None or row is local else max(0.0, statistics.median(floor.times) - compute)
    compute = min(compute, time)
    overhead = min(contention, time - compute)
    return {"compute": compute, "overhead": overhead, "exposed": time - compute - overhead}


def paired_ratio(row: Row, other: Row | None) -> float | None:
    """The median over repetitions of the ratio of the two, so that the machine's drift cancels."""
    if other is None:
        return None
    return statistics.median(a / b for a, b in zip(row.times, other.times, strict=False))


def disturbances(rows: Sequence[Row]) -> list[str]:
    """The share of processor time that other users of the physical machine took."""
    shares = [(share, row.name) for row in rows if row.name != "wire" for share in row.stolen]
    worst, name = max(shares, default=(0.0, ""))
    if worst <= DISTURBED:
        return []
    usual = statistics.mean(share for share, _ in shares)
    return [
        f"others on this physical machine took {worst:.0%} of the processors' time while {name} was timed,"
        f" in every try (steal; {usual:.1%} on average): take more repetitions, or another hour"
    ]


def to_limit(times: Sequence[float], floors: Sequence[float], bounds: Sequence[float]) -> float | None:
    """Ratio to the larger of the floor and the scheduler's lower bound of the same repetition (their median),
    so that the machine's drift cancels.
    """
    both = [max(pair) for pair in zip(floors, bounds, strict=False)]
    limits = both or floors or bounds
    pairs = zip(times, limits, strict=False)
    return statistics.median(time / limit for time, limit in pairs) if limits else None


# Column, figure of a row (seconds are shown in ms), and how it is written.
COLUMNS = (
    ("{unit}/s", "throughput", ".1f"),
    ("exposed", "exposed", "ms"),
    ("link", "utilisation", ".0%"),
    ("predicted", "predicted", "ms"),
    ("MB", "megabytes", ".0f"),
    ("comm CPU", "communication_cpu", "ms"),
    ("/floor", "to_floor", ".2f"),
    ("/limit", "to_limit", ".2f"),
    ("/best peer", "to_best_peer", ".2f"),
)


def show(report: dict[str, Any]) -> None:
    """Prints the whole comparison."""
    output = console()
    unit = models.unit(report["job"]["model"])
    columns = ["baseline", "ms/iter", "range", *(name.format(unit=unit) for name, _, _ in COLUMNS)]
    found = table(title(report), columns, ["baseline"])
    for entry in report["baselines"]:
        found.add_row(entry["name"], *cells(entry), style="bold" if entry["kind"] == "commsched" else None)
    output.print(found)
    for line in [*notes(report), *throughput_lines(report)]:
        output.print(line, markup=False, highlight=False)


def exit_status(report: dict[str, Any]) -> int:
    """The status of a command that has made this report."""
    failed = any(entry["status"] in (WRONG, FAILED) for entry in report["baselines"])
    return 130 if report["interrupted"] else int(failed)


def title(report: dict[str, Any]) -> str:
    job, place = report["job"], report["place"]
    where = f"{place['ranks']} ranks on this machine"
    if place["kind"] == "emulated hosts":
        where = f"{place['hosts']} hosts at {', '.join(sorted(set(place['links'])))}"
        if place.get("per_host", 1) > 1:
            where += f", {place['per_host']} ranks on each"
    return f"{job['model']}, {job['batch']} per rank, {where}"


def cells(entry: dict[str, Any]) -> list[str]:
    if "time" not in entry:
        return [entry["status"]]
    figures = {**entry, "megabytes": entry["memory"] / 1e6}
    others = [shown(figures.get(name), form) for _, name, form in COLUMNS]
    return [ms(entry["time"]), f"{ms(entry['low'])}-{ms(entry['high'])}", *others]


def notes(report: dict[str, Any]) -> list[str]:
    """Notes below the table: limits, reasons for empty rows, whether it is complete."""
    lines = []
    if report["bound"]:
        line = f"lower bound for the measured profile and link: {ms(report['bound'])} ms"
        beside = report.get("bound_beside")
        if beside:
            line += f"; with the compute as it is beside the same traffic: {ms(beside)} ms"
        lines.append(line)
    for entry in report["baselines"]:
        if entry["status"] != "ok":
            first_line = entry["reason"].strip().splitlines()[0]
            lines.append(f"{entry['name']}: {entry['status']}: {first_line}")
        elif entry["reason"]:
            lines.append(f"{entry['name']}: {entry['reason']}")
        if entry.get("changes") and "time" in entry:
            changes = ", ".join(f"{name}={value}" for name, value in entry["changes"].items())
            lines.append(f"{entry['name']}: trained with {changes}")
    lines += report["doubts"]
    if not report["effort"]["interleaved"]:
        lines.append("memory is short: the baselines ran one after the other, not in turn")
    if report["interrupted"]:
        lines.append("interrupted: the figures are of what was measured until then")
    return lines


def throughput_lines(report: dict[str, Any]) -> list[str]:
    """One line per baseline, worded as Horovod's benchmark words it."""
    unit, ranks = models.unit(report["job"]["model"]), report["place"]["ranks"]
    kind = "GPU" if report["job"]["device"].startswith("cuda") else "CPU"
    lines = []
    for entry in report["baselines"]:
        if entry.get("throughput"):
            rates = entry["throughputs"]
            mean, margin = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
            lines.append(f"{entry['name']}: Total {unit}/sec on {ranks} {kind}(s): {mean:.1f} +-{margin:.1f}")
    return lines


def shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.0f}" if form == "ms" else format(value, form)


ms = partial(shown, form="ms")
