"""`python -m dnn_bench collectives`: reduce-scatter, all-gather and all-reduce by themselves."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dnn_bench.baselines.registry import OURS, PEER, Baseline, MissingPeer, get
from dnn_bench.command_line import chosen, console, one_line_errors, parser
from dnn_bench.launch import add_place, place_of

HERE = "dnn_bench.collectives.transports."
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def transports() -> dict[str, Baseline]:
    """Every transport by name."""
    entries = [
        Baseline("direct", OURS, HERE + "Ours", {"transport": "direct"}),
        Baseline("ring", OURS, HERE + "Ours", {"transport": "ring"}),
        Baseline("gloo", PEER, HERE + "Gloo"),
        replace(get("horovod"), trainer=HERE + "Horovod"),
    ]
    return {entry.name: entry for entry in entries}


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "collectives",
        "Checks and times the collectives over each transport, and fits seconds = alpha + beta * bytes. "
        "Algorithm bandwidth is bytes of the whole tensor per second; bus bandwidth is what the links carry.",
    )
    add_place(given)
    known = ",".join(transports())
    given.add_argument("--transports", default=known, metavar="A,B", help="transports to measure")
    given.add_argument("--sizes", default="64k,256k,1m,4m,16m", help="bytes of the whole tensor")
    given.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    return given.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    sizes = [size_of(text) for text in options.sizes.split(",")]
    known = transports()
    report = run(options, [known[name] for name in chosen("transport", options.transports, [*known])], sizes)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {options.json}")
    return int(any(status == "failed" for status, _ in report["problems"].values()))


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"a size is a number of bytes such as 64k or 16m, not {text!r}")
    return int(match[1]) * UNITS[match[2]]


def run(options: argparse.Namespace, entries: list[Baseline], sizes: list[int]) -> dict[str, Any]:
    """Measures one transport after the other and prints the tables."""
    from dnn_bench.baselines.job import Job
    from dnn_bench.collectives import results
    from dnn_bench.runner import environment
    from dnn_bench.runner.sets import asked

    rows: list[dict[str, Any]] = []
    problems: dict[str, tuple[str, str]] = {}
    with place_of(options) as place:
        for entry in entries:
            print(f"measuring {entry.name}", file=sys.stderr, flush=True)
            try:
                answers = asked(entry, Job("mlp_tiny"), place, "collectives", sizes)
                rows += results.combine(entry.name, answers)
            except MissingPeer as error:
                problems[entry.name] = ("missing", str(error))
            except RuntimeError as error:
                problems[entry.name] = ("failed", str(error))
        report = {
            "kind": "collectives", "environment": environment.describe(),
            "place": {**place.describe(), "ranks": place.size, "rate": place.rate},
            "rows": rows, "fits": results.fits(rows), "problems": problems,
        }  # fmt: skip
    results.show(report, console())
    return report
