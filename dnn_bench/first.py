"""`python -m dnn_bench first`: a short comparison that ends in four sentences and a page with charts.

It trains a model on two workers, on emulated hosts where that is possible, else over the loopback of
this machine. The last sentence is about a run's first steps, in which commsched measures and plans.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dnn_bench import models
from dnn_bench.baselines import get
from dnn_bench.cluster import Cluster, ClusterError
from dnn_bench.command_line import check_least, one_line_errors, parser
from dnn_bench.launch import Hosts, Place, ThisMachine

WORKERS = 2
MLP_BATCH = 512
PEERS = ("ddp", "ddp_4mb")  # the ordinary ways
BASELINES = ("local", *PEERS, "auto")
FIRST, OF_FIRST = 15, ("ddp", "auto")  # steps that are timed from the start, and of which baselines


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser("first", __doc__)
    text = "speed of the link between the two emulated hosts, which need root and iproute2"
    add = command.add_argument
    add("--link", default="1gbit", help=text)
    add("--local", action="store_true", help="use the loopback, without emulated hosts")
    add("--model", default="mlp", help="model to train")
    add("--batch-size", type=int, help=f"samples per worker (mlp: {MLP_BATCH}, others: the model's own)")
    add("--reps", type=int, default=5, help="repetitions of every baseline")
    add("--html", type=Path, default="commsched-first.html", metavar="FILE", help="the page to write")
    return command.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    from dnn_bench.baselines.trainer import Job
    from dnn_bench.report import page
    from dnn_bench.runner.compare import Effort, check_writable, compare
    from dnn_bench.runner.results import exit_status
    from dnn_bench.runner.sets import RankFailed, asked

    options = parse(arguments)
    if options.batch_size is None:
        options.batch_size = MLP_BATCH if options.model == "mlp" else models.spec(options.model).batch
    check_least(options, 1, "batch_size", "reps")
    html = options.html.absolute()
    html.parent.mkdir(parents=True, exist_ok=True)
    check_writable(html)
    job = Job(models.spelt(options.model), options.batch_size)
    effort = Effort(options.reps, iterations=2, trace="best")
    with place_of(options) as (place, network):
        print(f"Network: {network}.", flush=True)
        report = compare(job, place, [get(name) for name in BASELINES], effort)
        if report["interrupted"]:  # baselines may have different numbers of repetitions
            return exit_status(report)
        report["answer"] = answer(report)
        try:
            # Users' runs do not wait for the plan, as others do so that the same step always has it.
            started = (replace(get(name), environment={"COMMSCHED_WAIT_FOR_PLAN": ""}) for name in OF_FIRST)
            measured = [asked(baseline, job, place, "block", 0, FIRST) for baseline in started]
            report["answer"].append(first_steps(*(rows[0]["iterations"] for rows in measured)))
        except RankFailed as error:
            report["answer"].append(f"The first {FIRST} steps could not be measured: {error}")
    print("\n".join(report["answer"]))
    html.write_text(page.render([report]))
    print(f"The page with the picture: {html}")
    return exit_status(report)


@contextmanager
def place_of(options: argparse.Namespace) -> Iterator[tuple[Place, str]]:
    """Yield the place where the workers run, and a description of the network between them."""
    loopback = f"the loopback of this machine, or its memory, between {WORKERS} workers, faster than a cable"
    if options.local:
        yield ThisMachine(WORKERS), loopback
        return
    cluster = Cluster(WORKERS, options.link)  # a link that cannot be read is an error, with root or without
    try:
        cluster.start()
    except ClusterError as error:
        yield ThisMachine(WORKERS), f"{loopback} ({error})"
        return
    with closing(cluster):
        yield Hosts(cluster), f"an emulated link of {options.link} between {WORKERS} hosts on this machine"


def first_steps(plain: Sequence[float], ours: Sequence[float]) -> str:
    usual, longest = statistics.median(plain), max(ours)
    return (
        f"Of its first {len(ours)} steps, in which it measures and plans, the longest takes"
        f" {longest * 1e3:.0f} ms, {longest / usual:.2f} times DDP's median of {usual * 1e3:.0f} ms:"
        f" {' '.join(f'{seconds * 1e3:.0f}' for seconds in ours)}."
    )


def answer(report: dict[str, Any]) -> list[str]:
    """Three sentences: the network's cost, the best ordinary way, commsched; ranges are over repetitions."""
    rows = {entry["name"]: entry for entry in report["baselines"]}
    missing = [name for name in BASELINES if "time" not in rows.get(name, {})]
    if missing:
        reasons = [
            f"{name}: {rows[name]['reason'].strip() or 'interrupted'}" for name in missing if name in rows
        ]
        return [f"No answer: {', '.join(missing)} could not be measured.", *reasons]
    ddp, local, ours = rows["ddp"], rows["local"], rows["auto"]
    best = min((rows[name] for name in PEERS), key=lambda row: row["time"])
    costs = [1 - alone / whole for alone, whole in zip(local["times"], ddp["times"], strict=True)]
    gains = [theirs / mine for theirs, mine in zip(best["times"], ours["times"], strict=True)]
    kind = "DDP as it comes" if best is ddp else "DDP with buckets of 4 MB"
    return [
        f"This network costs {_range(costs, '.0%')} of a step: DDP takes {_seconds(ddp)}, and "
        f"{_seconds(local)} without communication.",
        f"The best ordinary way, {kind}, takes {_seconds(best)} per step.",
        f"commsched takes {_seconds(ours)} per step: {verdict(gains)}.",
        *report["doubts"],
    ]


def verdict(gains: Sequence[float]) -> str:
    """Put the ratios of the times, one per repetition, into words."""
    ratio = _range(gains, ".2f")
    if min(gains) > 1:
        return f"{ratio} times as fast"
    if max(gains) < 1:
        return f"{ratio} times as fast, that is, slower"
    return f"{ratio} times as fast, no clear difference"


def _range(values: Sequence[float], form: str) -> str:
    """The median, and the smallest and the largest value in parentheses."""
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['time'] * 1e3:.0f} ms ({row['low'] * 1e3:.0f} to {row['high'] * 1e3:.0f})"
