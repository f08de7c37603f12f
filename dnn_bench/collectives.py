"""`python -m dnn_bench collectives`: reduce-scatter, all-gather and all-reduce by themselves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commsched.cli.options import bytes_of
from dnn_bench.baselines import OURS, PEER, Baseline, MissingPeer, get
from dnn_bench.command_line import chosen, console, one_line_errors, parser, save, table
from dnn_bench.launch import add_place, place_of
from scheduler.ir.link import FEWEST_SIZES, fit

HERE = "dnn_bench.transports."
WORDS = ("operation", "transport")  # columns of words in tables


def transports() -> dict[str, Baseline]:
    entries = [
        Baseline("direct", OURS, HERE + "Ours", {"transport": "direct"}),
        Baseline("ring", OURS, HERE + "Ours", {"transport": "ring"}),
        Baseline("tiers", OURS, HERE + "Ours", {"transport": "tiers"}),
        Baseline("operations", OURS, HERE + "Operations"),
        Baseline("gloo", PEER, HERE + "Gloo"),
        replace(get("horovod"), trainer=HERE + "Horovod"),
    ]
    return {entry.name: entry for entry in entries}


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "collectives",
        "Checks and times the collectives over each transport, and fits seconds = alpha + beta * bytes. "
        "Algorithm bandwidth is bytes of the whole tensor per second; bus bandwidth is what the links carry.",
    )
    add_place(command)
    known = ",".join(transports())
    command.add_argument("--transports", default=known, metavar="A,B", help="transports to measure")
    command.add_argument("--sizes", default="64k,256k,1m,4m,16m", help="bytes of the whole tensor")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    return command.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    sizes = [bytes_of("--sizes", text) for text in options.sizes.split(",")]
    known = transports()
    report = run(options, [known[name] for name in chosen("transport", options.transports, [*known])], sizes)
    save(json.dumps(report, indent=1) + "\n", options.json)
    return int(any(status == "failed" for status, _ in report["problems"].values()))


def run(options: argparse.Namespace, entries: list[Baseline], sizes: list[int]) -> dict[str, Any]:
    """Measures one transport after the other and prints the tables."""
    from dnn_bench.baselines.trainer import Job
    from dnn_bench.runner import results
    from dnn_bench.runner.sets import asked

    rows: list[dict[str, Any]] = []
    problems: dict[str, tuple[str, str]] = {}
    with place_of(options) as place:
        for entry in entries:
            print(f"measuring {entry.name}", file=sys.stderr, flush=True)
            try:
                answers = asked(entry, Job("mlp_tiny"), place, "collectives", sizes)
                rows += combine(entry.name, answers, place.per_host)
            except MissingPeer as error:
                problems[entry.name] = ("missing", str(error))
            except RuntimeError as error:
                problems[entry.name] = ("failed", str(error))
        report = {
            "kind": "collectives", "environment": results.describe_machine(),
            "place": place.describe(),
            "rows": rows, "fits": fits(rows), "problems": problems,
        }  # fmt: skip
    show(report)
    return report


def combine(
    transport: str, samples: Sequence[Sequence[dict[str, Any]]], per_host: int = 1
) -> list[dict[str, Any]]:
    """One row per operation and size from every rank's samples, of which the slowest counts.

    Algorithm bandwidth is bytes of the whole tensor per second. Bus bandwidth is what the slowest link
    carries if the algorithm is the best one, so it can be compared with the link's rate; `per_host` ranks
    share a link.
    """
    links = len(samples) // per_host
    share = (links - 1) / links
    rows = []
    for same in zip(*samples, strict=True):
        row = {**same[0], "transport": transport}
        row |= {name: max(sample[name] for sample in same) for name in ("seconds", "cpu")}
        algorithm = row["bytes"] / row["seconds"]
        bus = algorithm * {"reduce_scatter": share, "all_gather": share, "broadcast": 1}.get(
            row["operation"], 2 * share
        )
        rows.append({**row, "algorithm_bandwidth": algorithm, "bus_bandwidth": bus})
    return rows


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """alpha + beta * bytes for each transport and operation with enough sizes."""
    fitted = []
    for operation, transport in dict.fromkeys((row["operation"], row["transport"]) for row in rows):
        same = [row for row in rows if (row["operation"], row["transport"]) == (operation, transport)]
        sizes = [row["bytes"] for row in same]
        if len(set(sizes)) >= FEWEST_SIZES:
            link = fit(sizes, [row["seconds"] for row in same])
            figures = {"alpha": link.alpha, "beta": link.beta, "error": link.error}
            fitted.append({"transport": transport, "operation": operation, **figures})
    return fitted


def show(report: dict[str, Any]) -> None:
    output = console()
    output.print(bandwidths(report))
    fitted = table("seconds = alpha + beta * bytes", (*WORDS, "alpha us", "beta ns/byte", "error"), WORDS)
    for one in sorted(report["fits"], key=lambda one: (one["operation"], one["beta"])):
        figures = f"{one['alpha'] * 1e6:.0f}", f"{one['beta'] * 1e9:.3f}", f"{one['error']:.1%}"
        fitted.add_row(one["operation"], one["transport"], *figures)
    if report["fits"]:
        output.print(fitted)
    for name, (status, reason) in report["problems"].items():
        output.print(f"{name}: {status}: {reason.strip().splitlines()[0]}", markup=False, highlight=False)


def bandwidths(report: dict[str, Any]) -> Any:
    place = report["place"]
    where = ", ".join(dict.fromkeys(place.get("links", ["this machine"])))
    rate = place["rate"]
    figures = ("ms", "cpu ms", "algorithm MB/s", "bus MB/s", "of the link")
    shown = table(f"{place['ranks']} ranks, {where}", ("operation", "bytes", "transport", *figures), WORDS)
    previous = None
    for row in sorted(report["rows"], key=lambda row: (row["operation"], row["bytes"], row["seconds"])):
        if previous is not None and previous != (row["operation"], row["bytes"]):
            shown.add_section()
        previous = (row["operation"], row["bytes"])
        shown.add_row(
            row["operation"],
            str(row["bytes"]),
            row["transport"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['cpu'] * 1e3:.2f}",
            f"{row['algorithm_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / 1e6:.1f}",
            f"{row['bus_bandwidth'] / rate:.0%}" if rate else "",
        )
    return shown
