"""`python -m dnn_bench suite`: comparisons of several models, each at links that fit their compute."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dnn_bench.command_line import one_line_errors, parser

if TYPE_CHECKING:
    from dnn_bench.suite.run import Wanted

MODELS = "mlp,vgg_tiny,resnet_tiny,bert_tiny,gpt2_tiny"
BASELINES = "ddp,ddp_1mb,ddp_4mb,ddp_8mb,horovod,horovod_4mb,fsdp2,fsdp2_keep,zero1,wfbp,dear,pipedap,auto"
GIVE_UP = 1.15  # a tuned peer so much slower than the best one in two repetitions will not be the best one


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
            measure(options)
    except KeyboardInterrupt:
        print(f"{summary(options.out, options.schedule)}\n\ninterrupted: the same command goes on from here")
        return 130
    print(summary(options.out, options.schedule))
    return 0


def measure(options: argparse.Namespace) -> None:
    from dnn_bench.runner.cli import chosen
    from dnn_bench.runner.compare import Effort
    from dnn_bench.runner.watcher import bars
    from dnn_bench.suite import run

    entries = chosen(options.baseline)
    cells = wanted(options)
    options.out.mkdir(parents=True, exist_ok=True)
    trace = "all" if options.trace else "best"
    effort = Effort(options.reps, options.iters, trace=trace, give_up=GIVE_UP)
    missing = sum(cell.missing for cell in cells)
    with bars(44) as shown:
        if missing < len(cells):
            there = f"{len(cells) - missing} of {len(cells)} cells are there already"
            shown.console.print(there, highlight=False)
        progress = Progress(shown, missing)
        run.measure(cells, entries, effort, progress.watcher, progress.begin)


def wanted(options: argparse.Namespace) -> list[Wanted]:
    """Every cell of the table; names and numbers are checked before anything starts."""
    from dnn_bench import models
    from dnn_bench.suite.run import Wanted

    names = [models.spelt(name.strip()) for name in options.models.split(",")]
    hosts, ratios = numbers(options.hosts, int, "--hosts"), numbers(options.ratios, float, "--ratios")
    return [Wanted(m, h, r, options.out) for h in hosts for m in names for r in ratios]


def numbers(text: str, kind: Callable[[str], Any], flag: str) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0 or (kind is int and min(found) < 2):
        least = "whole numbers of at least 2" if kind is int else "numbers above 0"
        raise ValueError(f"{flag} takes {least} with commas between them, not {text!r}")
    return found


class Progress:
    """A bar for the cells and one for the cell's steps; in a log, lines."""

    def __init__(self, bars: Any, missing: int) -> None:
        from dnn_bench.runner.watcher import Watcher

        self.bars, self.missing, self.begun = bars, missing, 0
        self.cells = bars.add_task("cells", total=missing)
        self.watcher = Watcher(bars)

    def begin(self, cell: Wanted, link: str, left: float | None) -> None:
        rest = "" if left is None else f", about {max(1, round(left / 60))} min left"
        line = f"[{self.begun + 1}/{self.missing}] {cell}: {link}{rest}"
        self.bars.console.print(line, markup=False, highlight=False)
        self.bars.update(self.cells, completed=self.begun, description=f"cells{rest}")
        self.begun += 1


def summary(folder: Path, schedule: str) -> str:
    """The table of the folder's cells; incomplete ones are named and left out."""
    from dnn_bench.suite.figures import cell_of
    from dnn_bench.suite.run import read
    from dnn_bench.suite.table import markdown

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
