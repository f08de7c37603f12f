"""`python -m dnn_bench compare`: any baselines side by side on one model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dnn_bench import models
from dnn_bench.command_line import add_data_dir, add_job, one_line_errors, parser, save, shape_of
from dnn_bench.launch import add_place, place_of

if TYPE_CHECKING:
    from dnn_bench.baselines import Baseline
    from dnn_bench.baselines.trainer import Job

LIMITS = ["local", "floor", "wire"]  # measured always: the ratios and the shares need them


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "compare",
        "Trains one model with several baselines side by side on an emulated cluster. Each one's first steps "
        "are checked against one process before it is timed; repetitions are interleaved (A B C A B C ...).",
    )
    add_job(given, model="mlp", baseline="all")
    add_data_dir(given)
    add_place(given, link="250mbit")
    given.add_argument("--reps", type=int, default=5, help="repetitions of every baseline")
    given.add_argument("--iters", type=int, default=5, help="iterations per repetition")
    given.add_argument("--warmup", type=int, default=1, help="untimed iterations before each repetition")
    given.add_argument("--no-trace", action="store_true", help="record no timelines")
    given.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    given.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts to this file")
    return given.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    from dnn_bench.report import page
    from dnn_bench.runner import results
    from dnn_bench.runner.compare import Effort, compare

    options = parse(arguments)
    for path in filter(None, (options.json, options.html)):
        check_writable(path)
    entries, job = chosen(options.baseline), job_of(options)
    effort = Effort(options.reps, options.iters, options.warmup, "none" if options.no_trace else "all")
    with place_of(options) as place:
        report = compare(job, place, entries, effort)
    results.show(report)
    save(json.dumps(report, indent=1) + "\n", options.json)
    save(page.render([report]), options.html)
    return results.exit_status(report)


def chosen(text: str) -> list[Baseline]:
    """The limits and the named baselines, each once; unknown names are refused before anything starts."""
    from dnn_bench import baselines

    named = [name.strip() for name in text.split(",") if name.strip()]
    wanted = baselines.names() if text == "all" else named
    entries = [baselines.get(name) for name in [*LIMITS, *wanted]]
    return list({entry.name: entry for entry in entries}.values())


def check_writable(path: Path) -> None:
    """Fail before the measurement if a file cannot be written."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in a folder that exists and is yours")


def job_of(options: argparse.Namespace) -> Job:
    from dnn_bench.baselines.trainer import Job

    for name, least in (("batch_size", 0), ("reps", 1), ("iters", 1), ("threads", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {least}, not {getattr(options, name)}")
    shape = shape_of(options)
    if unknown := set(shape) - set(models.spec(options.model).shape):
        raise ValueError(f"{options.model} has no {' or '.join(sorted(unknown))}")
    job = Job(options.model, options.batch_size, shape, threads=options.threads, data_dir=options.data_dir)
    if job.data_dir:
        job.sample(1, 0)  # a folder that cannot be used is refused before anything starts
    return job
