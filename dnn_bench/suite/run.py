"""Measures the cells of the table that are missing."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dnn_bench.baselines import Baseline, get
from dnn_bench.baselines.job import Job
from dnn_bench.cluster import Cluster
from dnn_bench.launch import Hosts, ThisMachine
from dnn_bench.runner.compare import Comparison, Effort
from dnn_bench.runner.crew import Crew
from dnn_bench.runner.memory import estimate
from dnn_bench.runner.sets import RankSet
from dnn_bench.runner.watcher import Watcher
from dnn_bench.suite.figures import link_for

Report = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """One cell of the table: a comparison whose report is kept in a file of its own."""

    model: str
    hosts: int
    ratio: float
    folder: Path

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, ratio {self.ratio:g}"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.model}_{self.hosts}hosts_{self.ratio:g}.json"

    @property
    def missing(self) -> bool:
        """An interrupted measurement is shown, and made again."""
        return not self.path.exists() or bool(read(self.path)["interrupted"])

    @property
    def weight(self) -> float:
        """How long it takes, compared with others: hosts share the processors."""
        return self.hosts * (1 + self.ratio)


class Remaining:
    """How long the cells that are left will take, judged by those that are done."""

    def __init__(self, cells: Sequence[Wanted]) -> None:
        self.weight = sum(cell.weight for cell in cells)
        self.done, self.seconds = 0.0, 0.0

    def add(self, cell: Wanted, seconds: float) -> None:
        self.done += cell.weight
        self.seconds += seconds

    @property
    def left(self) -> float | None:
        """Seconds; None before the first cell."""
        return self.seconds / self.done * (self.weight - self.done) if self.done else None


def measure(
    cells: Sequence[Wanted],
    entries: Sequence[Baseline],
    effort: Effort,
    watcher: Watcher,
    begin: Callable[[Wanted, str, float | None], None],
) -> None:
    """Measures the missing ones, told to `begin` with their link and the seconds that are left.

    All ratios of a model are measured on one cluster whose links change their speed, so that limits and peers
    are started and checked once.
    """
    missing = [cell for cell in cells if cell.missing]
    remaining = Remaining(missing)
    for (hosts, model), group in groupby(missing, key=lambda cell: (cell.hosts, cell.model)):
        job = Job(model)
        with Cluster(hosts, "unlimited") as cluster, Crew() as crew:
            started = time.monotonic()
            compute = compute_seconds(job, hosts)
            for cell in group:
                link = link_for(cell.ratio, compute, estimate(job).parameters, hosts)
                begin(cell, link, remaining.left)
                cluster.set_link(link)
                report = Comparison(job, Hosts(cluster), entries, effort, watcher, crew=crew).run()
                keep(report, cell)
                if report["interrupted"]:
                    raise KeyboardInterrupt
                compute = local_seconds(report) or compute
                remaining.add(cell, time.monotonic() - started)
                started = time.monotonic()


def read(path: Path) -> Report:
    try:
        report: Report = json.loads(path.read_text())
        _ = report["interrupted"], report["baselines"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no report of a comparison: move it away, and measure it again") from None
    return report


def keep(report: Report, cell: Wanted) -> None:
    """Writes the cell; a file that exists is whole."""
    draft = cell.path.with_suffix(".part")
    draft.write_text(json.dumps({**report, "ratio": cell.ratio}, indent=1) + "\n")
    draft.replace(cell.path)


def local_seconds(report: Report) -> float | None:
    """An iteration's compute as a comparison found it; None where it was not measured."""
    times = [row["time"] for row in report["baselines"] if row["name"] == "local" and "time" in row]
    return times[0] if times else None


def compute_seconds(job: Job, ranks: int) -> float:
    """An iteration's compute while all ranks compute at once on this machine: a first look, which the first
    comparison of the model, with its repetitions over minutes, corrects for the next ones.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dnn_bench-") as directory,
        RankSet(get("local"), job, ThisMachine(ranks), Path(directory)) as workers,
    ):
        workers.start()
        blocks = workers.call("block", 2, 5)
    return max(statistics.median(block["iterations"]) for block in blocks)
