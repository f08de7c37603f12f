"""`python -m dnn_bench converge`: real training with every schedule and number of workers."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dnn_bench.baselines import OURS, Baseline, get, names
from dnn_bench.command_line import console, one_line_errors, parser, table

if TYPE_CHECKING:
    from dnn_bench.converge_tasks import Run


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "converge",
        "Trains a small CNN on digits and a character model on Python's documentation: in one process, and "
        "with every schedule and number of workers at the same global batch. All loss curves must be one.",
    )
    given.add_argument("--task", default="digits,text", help="tasks to train")
    given.add_argument("--baseline", default="all", metavar="A,B", help="schedules to train with, or 'all'")
    given.add_argument("--workers", default="1,2,3,4", help="numbers of workers")
    given.add_argument("--steps", type=int, default=200, help="steps of a run")
    given.add_argument("--seeds", type=int, default=1, help="seeds of weights and batches (default: 1)")
    given.add_argument("--json", type=Path, metavar="FILE", help="write every curve to this file")
    given.add_argument("--png", type=Path, metavar="FILE", help="draw the curves into this file")
    return given.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    from dnn_bench.converge_tasks import problems

    options = parse(arguments)
    all_ours = [entry for entry in map(get, names()) if entry.kind == OURS]
    wanted = options.baseline.split(",")
    entries = all_ours if options.baseline == "all" else [get(name.strip()) for name in wanted]
    workers = [int(text) for text in options.workers.split(",")]
    if options.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {options.steps}")
    runs: list[Run] = []
    failures: dict[str, list[str]] = {}
    seeds = range(1, options.seeds + 1)
    for kind, seed in itertools.product(options.task.split(","), seeds):
        task = kind if len(seeds) == 1 else f"{kind}, seed {seed}"
        plain = train_one(kind, seed, get("local"), 1, options.steps, task, "plain")
        runs.append(plain)
        for size, entry in itertools.product(workers, entries):
            label = f"{task}, {entry.name}, {size} workers"
            print(f"training {label}", file=sys.stderr, flush=True)
            try:
                runs.append(train_one(kind, seed, entry, size, options.steps, task, entry.name))
            except RuntimeError as error:
                failures[label] = [str(error).splitlines()[0]]
                continue
            if entry.exact and (found := problems(runs[-1], plain)):
                failures[label] = found
    console().print(curves(runs, failures))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in runs]) + "\n")
    if options.png:
        draw(runs, options.png)
    for name, reasons in failures.items():
        print(f"{name}: {'; '.join(reasons)}")
    return int(bool(failures))


def train_one(kind: str, seed: int, entry: Baseline, size: int, steps: int, task: str, name: str) -> Run:
    import torch

    from dnn_bench.converge_tasks import Run, TaskJob, digest, mean_losses
    from dnn_bench.launch import ThisMachine
    from dnn_bench.runner.sets import asked

    job = replace(TaskJob.make(kind, size), seed=seed)
    with tempfile.TemporaryDirectory(prefix="dnn_bench-") as directory:
        path = Path(directory) / "parameters.pt"
        answers = asked(entry, job, ThisMachine(size), "train", steps, str(path))
        return Run(task, name, size, mean_losses(answers), answers[0]["accuracy"], digest(torch.load(path)))


def curves(runs: list[Run], failures: dict[str, list[str]]) -> Any:
    from dnn_bench.converge_tasks import deviation

    words = ("task", "baseline", "parameters")
    figures = ("end loss", "accuracy", "loss off by", "end loss off by", "parameters")
    columns = ("task", "baseline", "workers", *figures)
    found = table("the same training, by schedule and workers", columns, words)
    plain = {run.task: run for run in runs if run.baseline == "plain"}
    for run in runs:
        off = f"{deviation(run, plain[run.task]):.1e}"
        end = f"{run.end_loss / plain[run.task].end_loss - 1:+.2%}"
        cells = (f"{run.end_loss:.5f}", f"{run.accuracy:.4f}", off, end, run.digest)
        style = "red" if f"{run.task}, {run.baseline}, {run.workers} workers" in failures else None
        found.add_row(run.task, run.baseline, str(run.workers), *cells, style=style)
    return found


def draw(runs: list[Run], path: Path) -> None:
    """One panel per task; runs that coincide lie on top of each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for index, run in enumerate(run for run in runs if run.task == task):
            label = f"{run.baseline}, {run.workers} ({run.accuracy:.3f})"
            style: dict[str, Any] = {"linewidth": 1, "linestyle": ("-", "--", ":", "-.")[index % 4]}
            if run.baseline == "plain":
                style = {"linewidth": 4, "alpha": 0.3, "color": "black"}
            axis.plot(run.losses, label=label, **style)
        axis.set(title=task, xlabel="step", ylabel="loss of the global batch", yscale="log")
        axis.legend(fontsize=7, title="baseline, workers (accuracy)", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
