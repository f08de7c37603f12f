"""Bandwidths as nccl-tests defines them, the alpha-beta fit, and both as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dnn_bench.command_line import table
from scheduler.ir.link import FEWEST_SIZES, fit


def combine(transport: str, samples: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per operation and size from every rank's samples, of which the slowest counts.

    Algorithm bandwidth is bytes of the whole tensor per second. Bus bandwidth is what the slowest link
    carries if the algorithm is the best one, so it can be compared with the link's rate.
    """
    share = (len(samples) - 1) / len(samples)
    rows = []
    for same in zip(*samples, strict=True):
        row = {**same[0], "transport": transport}
        row |= {name: max(sample[name] for sample in same) for name in ("seconds", "cpu")}
        algorithm = row["bytes"] / row["seconds"]
        bus = algorithm * share * (2 if row["operation"] == "all_reduce" else 1)
        rows.append({**row, "algorithm_bandwidth": algorithm, "bus_bandwidth": bus})
    return rows


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """alpha + beta * bytes for each transport and operation with enough sizes."""
    found = []
    for operation, transport in dict.fromkeys((row["operation"], row["transport"]) for row in rows):
        same = [row for row in rows if (row["operation"], row["transport"]) == (operation, transport)]
        sizes = [row["bytes"] for row in same]
        if len(set(sizes)) >= FEWEST_SIZES:
            link = fit(sizes, [row["seconds"] for row in same])
            figures = {"alpha": link.alpha, "beta": link.beta, "error": link.error}
            found.append({"transport": transport, "operation": operation, **figures})
    return found


WORDS = ("operation", "transport")


def show(report: dict[str, Any], console: Console) -> None:
    console.print(bandwidths(report))
    fitted = table("seconds = alpha + beta * bytes", (*WORDS, "alpha us", "beta ns/byte", "error"), WORDS)
    for one in sorted(report["fits"], key=lambda one: (one["operation"], one["beta"])):
        figures = f"{one['alpha'] * 1e6:.0f}", f"{one['beta'] * 1e9:.3f}", f"{one['error']:.1%}"
        fitted.add_row(one["operation"], one["transport"], *figures)
    if report["fits"]:
        console.print(fitted)
    for name, (status, reason) in report["problems"].items():
        console.print(f"{name}: {status}: {reason.strip().splitlines()[0]}", markup=False, highlight=False)


def bandwidths(report: dict[str, Any]) -> Table:
    place = report["place"]
    where = ", ".join(dict.fromkeys(place.get("links", ["this machine"])))
    rate = place["rate"]
    figures = ("ms", "cpu ms", "algorithm MB/s", "bus MB/s", "of the link")
    found = table(f"{place['ranks']} ranks, {where}", ("operation", "bytes", "transport", *figures), WORDS)
    previous = None
    for row in sorted(report["rows"], key=lambda row: (row["operation"], row["bytes"], row["seconds"])):
        if previous is not None and previous != (row["operation"], row["bytes"]):
            found.add_section()
        previous = (row["operation"], row["bytes"])
        found.add_row(
            row["operation"],
            str(row["bytes"]),
            row["transport"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['cpu'] * 1e3:.2f}",
            f"{row['algorithm_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / rate:.0%}" if rate else "",
        )
    return found
