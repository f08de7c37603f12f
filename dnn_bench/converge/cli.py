"""`python -m dnn_bench converge`: the same training with every schedule and number of workers."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dnn_bench.baselines.registry import OURS, Baseline, get, names
from dnn_bench.cli_errors import one_line_errors

if TYPE_CHECKING:
    from dnn_bench.converge.results import Run


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench converge",
        description="Trains a small CNN on digits and a character model on Python's documentation: in one "
        "process, and with every schedule and number of workers at the same global batch. All loss curves "
        "must be one.",
    )
    parser.add_argument("--task", default="digits,text", help="tasks to train (default: %(default)s)")
    parser.add_argument(
        "--baseline", default="all", metavar="A,B", help="schedules to train with, or 'all' (default)"
    )
    parser.add_argument("--workers", default="1,2,3,4", help="numbers of workers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every curve to this file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves into this file")
    return parser.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    return run(parse(arguments))


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dnn_bench.converge import plot

    console = Console(width=None if sys.stdout.isatty() else 120)
    entries = chosen(options.baseline)
    workers = [int(text) for text in options.workers.split(",")]
    if options.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {options.steps}")
    runs: list[Run] = []
    failures: dict[str, list[str]] = {}
    for task in options.task.split(","):
        more, bad = train_all(task, entries, workers, options.steps)
        runs += more
        failures |= bad
    console.print(table(runs, failures))
    if options.json:
        options.json.write_text(json.dumps([one.to_dict() for one in runs]) + "\n")
    if options.png:
        plot.draw(runs, options.png)
    for name, reasons in failures.items():
        print(f"{name}: {'; '.join(reasons)}")
    return int(bool(failures))


def chosen(text: str) -> list[Baseline]:
    if text == "all":
        return [entry for entry in map(get, names()) if entry.kind == OURS]
    return [get(name.strip()) for name in text.split(",")]


def train_all(
    task: str, entries: list[Baseline], workers: list[int], steps: int
) -> tuple[list[Run], dict[str, list[str]]]:
    """Plain training first, then every baseline at every size; what differs is among the failures."""
    from dnn_bench.converge.results import problems

    plain = train_one(task, get("local"), 1, steps, name="plain")
    runs, failures = [plain], {}
    for size in workers:
        for entry in entries:
            label = f"{task}, {entry.name}, {size} workers"
            print(f"training {label}", file=sys.stderr, flush=True)
            try:
                one = train_one(task, entry, size, steps)
            except RuntimeError as error:
                failures[label] = [str(error).splitlines()[0]]
                continue
            runs.append(one)
            if found := problems(one, plain):
                failures[label] = found
    return runs, failures


def train_one(task: str, entry: Baseline, size: int, steps: int, name: str = "") -> Run:
    import torch

    from dnn_bench.converge.results import Run, digest, mean_losses
    from dnn_bench.converge.tasks import TaskJob
    from dnn_bench.launch import ThisMachine
    from dnn_bench.runner.sets import RankSet

    job = TaskJob.make(task, size)
    with tempfile.TemporaryDirectory(prefix="dnn_bench-") as directory:
        path = Path(directory) / "parameters.pt"
        with RankSet(entry, job, ThisMachine(size), Path(directory)) as ranks:
            ranks.start()
            answers = ranks.call("train", steps, str(path))
        name = name or entry.name
        return Run(task, name, size, mean_losses(answers), answers[0]["accuracy"], digest(torch.load(path)))


def table(runs: list[Run], failures: dict[str, list[str]]) -> Any:
    from rich.table import Table

    from dnn_bench.converge.results import deviation

    found = Table(title="the same training, by schedule and workers", title_justify="left")
    for column in ("task", "baseline", "workers", "last loss", "accuracy", "loss off by", "parameters"):
        found.add_column(column, justify="left" if column in ("task", "baseline", "parameters") else "right")
    plain = {run.task: run for run in runs if run.baseline == "plain"}
    for run in runs:
        off = f"{deviation(run, plain[run.task]):.1e}"
        figures = (f"{run.losses[-1]:.5f}", f"{run.accuracy:.4f}", off, run.digest)
        style = "red" if f"{run.task}, {run.baseline}, {run.workers} workers" in failures else None
        found.add_row(run.task, run.baseline, str(run.workers), *figures, style=style)
    return found
