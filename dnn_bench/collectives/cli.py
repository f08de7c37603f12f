"""`python -m dnn_bench collectives`: reduce-scatter, all-gather and all-reduce by themselves."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from dnn_bench.baselines.registry import OURS, PEER, Baseline, MissingPeer, get, require
from dnn_bench.cli_errors import one_line_errors
from dnn_bench.cluster.cli import add_cluster_arguments

HERE = "dnn_bench.collectives.transports."
SIZES = "64k,256k,1m,4m,16m"
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def transports() -> dict[str, Baseline]:
    """Every transport by name."""
    ours = [
        Baseline(name, OURS, HERE + "Ours", f"commsched's {name} transport", {"transport": name}, "commsched")
        for name in ("direct", "ring")
    ]
    gloo = Baseline("gloo", PEER, HERE + "Gloo", "torch.distributed's collectives")
    as_horovod = get("horovod")
    horovod = Baseline(
        "horovod",
        PEER,
        HERE + "Horovod",
        "Horovod's operations",
        {},
        "horovod",
        "horovod",
        as_horovod.environment,
    )
    return {entry.name: entry for entry in (*ours, gloo, horovod)}


def parse(arguments: list[str]) -> argparse.Namespace:
    known = ",".join(transports())
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench collectives",
        description="Checks and times the collectives over each transport, and fits seconds = alpha + beta * "
        "bytes. Algorithm bandwidth is bytes of the whole tensor per second; bus bandwidth is what the links "
        "carry.",
    )
    add_cluster_arguments(parser)
    parser.add_argument(
        "--local", type=int, metavar="N", help="run N ranks here, without emulated hosts and without root"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per rank (default: %(default)s)")
    parser.add_argument(
        "--transports", default=known, metavar="A,B", help="transports to measure (default: %(default)s)"
    )
    parser.add_argument("--sizes", default=SIZES, help="bytes of the whole tensor (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    return parser.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    sizes = [size_of(text) for text in options.sizes.split(",")]
    report = run(options, chosen(options.transports), sizes)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {options.json}")
    return int(any(status == "failed" for status, _ in report["problems"].values()))


def chosen(text: str) -> list[Baseline]:
    known = transports()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown transport {unknown[0]!r}; choose of: {', '.join(known)}")
    return [known[name] for name in names]


def size_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"a size is a number of bytes such as 64k or 16m, not {text!r}")
    return int(match[1]) * UNITS[match[2]]


def run(options: argparse.Namespace, entries: list[Baseline], sizes: list[int]) -> dict[str, Any]:
    """Measures one transport after the other and prints the tables."""
    from rich.console import Console

    from dnn_bench.collectives import results, table
    from dnn_bench.runner import environment
    from dnn_bench.runner.cli import WIDTH, place_of

    rows: list[dict[str, Any]] = []
    problems: dict[str, tuple[str, str]] = {}
    with place_of(options) as place, tempfile.TemporaryDirectory(prefix="dnn_bench-") as directory:
        for entry in entries:
            print(f"measuring {entry.name}", file=sys.stderr, flush=True)
            try:
                rows += results.combine(entry.name, measure(entry, place, Path(directory), sizes))
            except MissingPeer as error:
                problems[entry.name] = ("missing", str(error))
            except RuntimeError as error:
                problems[entry.name] = ("failed", str(error))
        report = {
            "kind": "collectives", "environment": environment.describe(),
            "place": {**place.describe(), "ranks": place.size, "rate": place.rate},
            "rows": rows, "fits": results.fits(rows), "problems": problems,
        }  # fmt: skip
    table.show(report, Console(width=None if sys.stdout.isatty() else WIDTH))
    return report


def measure(entry: Baseline, place: Any, directory: Path, sizes: list[int]) -> list[Any]:
    """Every rank's samples."""
    from dnn_bench.baselines.job import Job
    from dnn_bench.runner.sets import RankSet

    require(entry)
    with RankSet(entry, Job("mlp_tiny"), place, directory) as ranks:
        ranks.start()
        return ranks.call("collectives", sizes)
