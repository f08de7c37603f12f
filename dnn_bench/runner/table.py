"""The comparison as a Rich table, and throughput in Horovod's line format."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console

from dnn_bench import models
from dnn_bench.command_line import table

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


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the whole comparison."""
    unit = models.unit(report["job"]["model"])
    columns = ["baseline", "ms/iter", "range", *(name.format(unit=unit) for name, _, _ in COLUMNS)]
    found = table(title(report), columns, ["baseline"])
    for entry in report["baselines"]:
        found.add_row(entry["name"], *cells(entry), style="bold" if entry["kind"] == "commsched" else None)
    console.print(found)
    for line in [*notes(report), *throughput_lines(report)]:
        console.print(line, markup=False, highlight=False)


def title(report: dict[str, Any]) -> str:
    job, place = report["job"], report["place"]
    where = f"{place['ranks']} ranks on this machine"
    if place["kind"] == "emulated hosts":
        where = f"{place['hosts']} hosts at {', '.join(sorted(set(place['links'])))}"
    return f"{job['model']}, {job['batch']} per rank, {where}"


def cells(entry: dict[str, Any]) -> list[str]:
    if "time" not in entry:
        return [entry["status"]]
    figures = {**entry, "megabytes": entry["memory"] / 1e6}
    shown = [_shown(figures.get(name), form) for _, name, form in COLUMNS]
    return [_ms(entry["time"]), f"{_ms(entry['low'])}-{_ms(entry['high'])}", *shown]


def notes(report: dict[str, Any]) -> list[str]:
    """Notes below the table: limits, reasons for empty rows, whether it is complete."""
    lines = []
    if report["bound"]:
        line = f"lower bound for the measured profile and link: {_ms(report['bound'])} ms"
        beside = report.get("bound_beside")
        if beside:
            line += f"; with the compute as it is beside the same traffic: {_ms(beside)} ms"
        lines.append(line)
    for entry in report["baselines"]:
        if entry["status"] != "ok":
            first_line = entry["reason"].strip().splitlines()[0]
            lines.append(f"{entry['name']}: {entry['status']}: {first_line}")
        elif entry["reason"]:
            lines.append(f"{entry['name']}: {entry['reason']}")
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


def _ms(seconds: float) -> str:
    return _shown(seconds, "ms")


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.0f}" if form == "ms" else format(value, form)
