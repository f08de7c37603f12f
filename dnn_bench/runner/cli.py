"""`python -m dnn_bench compare`: any baselines side by side on one model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dnn_bench import models
from dnn_bench.cli_errors import one_line_errors
from dnn_bench.cluster import Cluster
from dnn_bench.cluster.cli import add_cluster_arguments

if TYPE_CHECKING:
    from dnn_bench.baselines import Baseline, Job
    from dnn_bench.launch import Place

WIDTH = 150  # of a table that goes to a file
LIMITS = ["local", "floor", "wire"]  # measured always: the ratios and the shares need them


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench compare",
        description="Trains one model with several baselines side by side on an emulated cluster. Each one's "
        "first steps are checked against one process before it is timed; repetitions are interleaved "
        "(A B C A B C ...).",
    )
    parser.add_argument("--model", default="mlp", help="one of: " + ", ".join(models.names()))
    parser.add_argument(
        "--baseline", default="all", metavar="A,B,C", help="'all', or names (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=0, help="samples per rank (default: the model's usual number)"
    )
    parser.add_argument(
        "--seq-len", type=int, help="tokens per sentence, for language models (default: the model's)"
    )
    parser.add_argument("--image-size", type=int, help="height and width of the images, for image models")
    parser.add_argument(
        "--data-dir", default="", metavar="PATH", help="folder of images or text (default: synthetic data)"
    )
    add_cluster_arguments(parser, link="250mbit")
    parser.add_argument(
        "--local", type=int, metavar="N", help="run N ranks here, without emulated hosts and without root"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per rank (default: %(default)s)")
    parser.add_argument(
        "--reps", type=int, default=5, help="repetitions of every baseline (default: %(default)s)"
    )
    parser.add_argument(
        "--iters", type=int, default=5, help="iterations per repetition (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=1,
        help="untimed iterations before each repetition (default: %(default)s)",
    )
    parser.add_argument("--no-trace", action="store_true", help="record no timelines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts to this file")
    return parser.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    for path in filter(None, (options.json, options.html)):
        check_writable(path)
    report = compare(options, chosen(options.baseline))
    save(report, options)
    failed = any(entry["status"] in ("wrong", "failed") for entry in report["baselines"])
    return 130 if report["interrupted"] else int(failed)


def chosen(text: str) -> list[Baseline]:
    """The limits and the named baselines, each once; unknown names are refused before anything starts."""
    from dnn_bench import baselines

    wanted = (
        baselines.names() if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    )
    entries = [baselines.get(name) for name in [*LIMITS, *wanted]]
    return list({entry.name: entry for entry in entries}.values())


def check_writable(path: Path) -> None:
    """Fail before the measurement if a file cannot be written."""
    folder = path.absolute().parent
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in a folder that exists and is yours")


def job_of(options: argparse.Namespace) -> Job:
    from dnn_bench.baselines.job import Job

    for name, least in (("batch_size", 0), ("reps", 1), ("iters", 1), ("threads", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {least}, not {getattr(options, name)}")
    spec = models.spec(options.model)
    shape = {name: getattr(options, name) for name in ("seq_len", "image_size") if getattr(options, name)}
    if unknown := set(shape) - set(spec.shape):
        raise ValueError(f"{options.model} has no {' or '.join(sorted(unknown))}")
    job = Job(options.model, options.batch_size, shape, threads=options.threads, data_dir=options.data_dir)
    if job.data_dir:
        job.sample(1, 0)  # a folder that cannot be used is refused before anything starts
    return job


@contextmanager
def place_of(options: argparse.Namespace) -> Iterator[Place]:
    from dnn_bench.launch import Hosts, ThisMachine

    if options.local is not None:
        if options.local < 1:
            raise ValueError(f"--local needs at least one rank, not {options.local}")
        yield ThisMachine(options.local, options.threads)
        return
    with Cluster(options.hosts, options.link, delay=options.delay, congestion=options.congestion) as cluster:
        yield Hosts(cluster, options.threads)


def compare(options: argparse.Namespace, entries: list[Baseline]) -> dict[str, Any]:
    """Measures and prints; the report also of an interrupted run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dnn_bench.runner import table
    from dnn_bench.runner.compare import Comparison, Effort, Watcher

    errors = Console(stderr=True)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    effort = Effort(options.reps, options.iters, options.warmup, "none" if options.no_trace else "all")
    job = job_of(options)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    with place_of(options) as place, bar as progress:
        watcher: Watcher = ProgressWatcher(progress) if errors.is_terminal else LineWatcher()
        report = Comparison(job, place, entries, effort, watcher).run()
    table.show(report, console)
    return report


class ProgressWatcher:
    """Shows a comparison's steps as one progress bar."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.task = progress.add_task("starting", total=None)
        self.done = -1  # a step is announced when it begins; a suite begins several comparisons

    def begin(self, total: int) -> None:
        self.progress.reset(self.task, total=total)
        self.done = -1

    def step(self, what: str) -> None:
        self.done += 1
        self.progress.update(self.task, completed=self.done, description=what)

    def more(self, what: str) -> None:
        self.progress.update(self.task, description=what)


class LineWatcher:
    """The same as lines, for a log file."""

    def begin(self, total: int) -> None:
        self.total, self.done = total, 0

    def step(self, what: str) -> None:
        self.done += 1
        print(f"[{self.done}/{self.total}] {what}", file=sys.stderr, flush=True)

    def more(self, what: str) -> None:
        self.done -= 1
        self.step(what)


def save(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {options.json}")
    if options.html:
        from dnn_bench.report import page

        options.html.write_text(page.render([report]))
        print(f"wrote {options.html}")
