"""The collectives' figures as Rich tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], console: Console) -> None:
    console.print(bandwidths(report))
    if report["fits"]:
        console.print(links(report))
    for name, (status, reason) in report["problems"].items():
        console.print(f"{name}: {status}: {reason.strip().splitlines()[0]}", markup=False, highlight=False)


def bandwidths(report: dict[str, Any]) -> Table:
    place = report["place"]
    where = ", ".join(dict.fromkeys(place.get("links", ["this machine"])))
    rate = place["rate"]
    table = Table(title=f"{place['ranks']} ranks, {where}", title_justify="left")
    for name in (
        "operation",
        "bytes",
        "transport",
        "ms",
        "cpu ms",
        "algorithm MB/s",
        "bus MB/s",
        "of the link",
    ):
        table.add_column(
            name, justify="left" if name in ("operation", "transport") else "right", no_wrap=True
        )
    previous = None
    for row in sorted(report["rows"], key=lambda row: (row["operation"], row["bytes"], row["seconds"])):
        if previous is not None and previous != (row["operation"], row["bytes"]):
            table.add_section()
        previous = (row["operation"], row["bytes"])
        table.add_row(
            row["operation"],
            str(row["bytes"]),
            row["transport"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['cpu'] * 1e3:.2f}",
            f"{row['algorithm_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / rate:.0%}" if rate else "",
        )
    return table


def links(report: dict[str, Any]) -> Table:
    table = Table(title="seconds = alpha + beta * bytes", title_justify="left")
    for name in ("operation", "transport", "alpha us", "beta ns/byte", "error"):
        table.add_column(name, justify="left" if name in ("operation", "transport") else "right")
    for fit in sorted(report["fits"], key=lambda fit: (fit["operation"], fit["beta"])):
        figures = f"{fit['alpha'] * 1e6:.0f}", f"{fit['beta'] * 1e9:.3f}", f"{fit['error']:.1%}"
        table.add_row(fit["operation"], fit["transport"], *figures)
    return table
