"""`python -m dnn_bench suite`: comparisons of several models, each at links that fit their compute."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dnn_bench import models
from dnn_bench.baselines import Baseline, get
from dnn_bench.baselines.trainer import Job
from dnn_bench.cluster import Cluster
from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.launch import Hosts, ThisMachine
from dnn_bench.runner.cli import chosen
from dnn_bench.runner.compare import Comparison, Effort
from dnn_bench.runner.memory import estimate
from dnn_bench.runner.sets import Crew, asked
from dnn_bench.runner.watcher import Watcher, bars
from dnn_bench.suite.figures import Report, cell_of, link_for, markdown

MODELS = "mlp,vgg_tiny,resnet_tiny,bert_tiny,gpt2_tiny"
BASELINES = "ddp,ddp_1mb,ddp_4mb,ddp_8mb,horovod,horovod_4mb,fsdp2,fsdp2_keep,zero1,wfbp,dear,pipedap,auto"
GIVE_UP = 1.15  # a tuned peer so much slower than the best one in two repetitions will not be the best one


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


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "suite",
        "Measures each model's compute, chooses links at which communication takes the wanted share of it, "
        "compares the baselines there, and sums up what one schedule gains, as Markdown.",
    )
    given.add_argument("--models", default=MODELS, metavar="A,B", help="models")
    given.add_argument("--ratios", default="0.5,1,2", help="ratios of communication to compute time")
    given.add_argument("--hosts", default="2", help="numbers of hosts")
    given.add_argument("--baseline", default=BASELINES, metavar="A,B", help="baselines")
    given.add_argument("--schedule", default="auto", help="schedule whose gain is summarised")
    given.add_argument("--reps", type=int, default=5, help="repetitions")
    given.add_argument("--iters", type=int, default=4, help="iterations per repetition")
    given.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the reports")
    text = "record every baseline's timeline, not only the two fastest ones'"
    given.add_argument("--trace", action="store_true", help=text)
    text = "measure nothing; summarise the reports in --out"
    given.add_argument("--summary", action="store_true", help=text)
    return given.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        if not options.summary:
            entries, cells = chosen(options.baseline), wanted(options)
            options.out.mkdir(parents=True, exist_ok=True)
            trace = "all" if options.trace else "best"
            measure(cells, entries, Effort(options.reps, options.iters, trace=trace, give_up=GIVE_UP))
    except KeyboardInterrupt:
        print(f"{summary(options.out, options.schedule)}\n\ninterrupted: the same command goes on from here")
        return 130
    print(summary(options.out, options.schedule))
    return 0


def wanted(options: argparse.Namespace) -> list[Wanted]:
    """Every cell of the table; names and numbers are checked before anything starts."""
    names = [models.spelt(name.strip()) for name in options.models.split(",")]
    hosts = numbers(options.hosts, int, 2, "--hosts takes whole numbers of at least 2")
    ratios = numbers(options.ratios, float, 1e-9, "--ratios takes numbers above 0")
    return [Wanted(m, h, r, options.out) for h in hosts for m in names for r in ratios]


def numbers(text: str, kind: Callable[[str], Any], least: float, rule: str) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ValueError(f"{rule} with commas between them, not {text!r}")
    return found


def measure(cells: Sequence[Wanted], entries: Sequence[Baseline], effort: Effort) -> None:
    """Measures the missing cells.

    All ratios of a model are measured on one cluster whose links change their speed, so that limits and peers
    are started and checked once.
    """
    missing = [cell for cell in cells if cell.missing]
    with bars(44) as shown:
        if len(missing) < len(cells):
            there = f"{len(cells) - len(missing)} of {len(cells)} cells are there already"
            shown.console.print(there, highlight=False)
        watcher = Watcher(shown)
        for (hosts, model), group in groupby(missing, key=lambda cell: (cell.hosts, cell.model)):
            job = Job(model)
            with Cluster(hosts, "unlimited") as cluster, Crew() as crew:
                compute = compute_seconds(job, hosts)
                for cell in group:
                    link = link_for(cell.ratio, compute, estimate(job).parameters, hosts)
                    number = f"[{missing.index(cell) + 1}/{len(missing)}]"
                    shown.console.print(f"{number} {cell}: {link}", markup=False, highlight=False)
                    cluster.set_link(link)
                    report = Comparison(job, Hosts(cluster), entries, effort, watcher, crew=crew).run()
                    keep(report, cell)
                    if report["interrupted"]:
                        raise KeyboardInterrupt
                    rows = [row for row in report["baselines"] if row["name"] == "local"]
                    compute = next((row["time"] for row in rows if "time" in row), compute)


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


def compute_seconds(job: Job, ranks: int) -> float:
    """An iteration's compute while all ranks compute at once on this machine: a first look, which the first
    comparison of the model, with its repetitions over minutes, corrects for the next ones.
    """
    blocks = asked(get("local"), job, ThisMachine(ranks), "block", 2, 5)
    return max(statistics.median(block["iterations"]) for block in blocks)


def summary(folder: Path, schedule: str) -> str:
    """The table of the folder's cells; incomplete ones are named and left out."""
    cells, notes = [], []
    for path in sorted(folder.glob("*_*hosts_*.json")):
        report = read(path)
        cell = cell_of(report, schedule)
        if report["interrupted"]:
            notes.append(f"{path.name}: interrupted, left out")
        elif cell is None:
            notes.append(f"{path.name}: {schedule} was not measured, left out")
        else:
            cells.append(cell)
    cells.sort(key=lambda cell: (cell.hosts, cell.ratio, cell.model))
    return "\n\n".join([markdown(cells), *notes])
