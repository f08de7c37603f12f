"""`python -m dnn_bench suite`: comparisons of several models, each at links that fit their compute."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from dnn_bench import models
from dnn_bench.baselines import AS_THEY_COME, Baseline, get
from dnn_bench.baselines.trainer import Job, estimate
from dnn_bench.cluster import Cluster
from dnn_bench.command_line import markdown as markdown_table
from dnn_bench.command_line import numbers, one_line_errors, parser
from dnn_bench.launch import Hosts, ThisMachine
from dnn_bench.runner.compare import Comparison, Effort, Watcher, bars, chosen
from dnn_bench.runner.results import absent, exit_status, ms, shown, to_limit
from dnn_bench.runner.sets import Crew, asked
from scheduler.ir.inputs import InputError, read_json

MODELS = "mlp,vgg_tiny,resnet_tiny,bert_tiny,gpt2_tiny"
BASELINES = (
    "ddp,ddp_1mb,ddp_4mb,ddp_8mb,horovod,horovod_4mb,fsdp2,fsdp2_keep,hsdp,hsdp_keep,zero1,"
    "wfbp,dear,pipedap,auto"
)
GIVE_UP = 1.15  # a tuned peer so much slower than the best one in two repetitions will not be the best one


class Shape(NamedTuple):
    """How many hosts a cluster has, and how many ranks each of them."""

    hosts: int
    per_host: int = 1

    @property
    def label(self) -> str:
        return f"{self.hosts}" if self.per_host == 1 else f"{self.hosts}x{self.per_host}"

    def __str__(self) -> str:
        return f"{self.hosts} hosts" + (f" of {self.per_host} ranks" if self.per_host > 1 else "")


@dataclass(frozen=True)
class Wanted:
    """One cell of the table: a comparison whose report is kept in a file of its own."""

    model: str
    shape: Shape
    ratio: float
    folder: Path

    def __str__(self) -> str:
        return f"{self.model}, {self.shape}, ratio {self.ratio:g}"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.model}_{self.shape.label}hosts_{self.ratio:g}.json"

    @property
    def missing(self) -> bool:
        """An interrupted measurement is shown, and made again."""
        return not self.path.exists() or bool(read(self.path)["interrupted"])


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "suite",
        "Measures each model's compute, chooses links at which communication takes the wanted share of it, "
        "compares the baselines there, and sums up what one schedule gains, as Markdown.",
    )
    command.add_argument("--models", default=MODELS, metavar="A,B", help="models")
    command.add_argument("--ratios", default="0.5,1,2", help="ratios of communication to compute time")
    command.add_argument("--hosts", default="2", help="numbers of hosts")
    command.add_argument("--per-host", default="1", metavar="N,M", help="numbers of ranks on each host")
    text = "share of the models' own batches that a rank gets; less where many ranks share few processors"
    command.add_argument("--batch", type=float, default=1.0, metavar="SHARE", help=text)
    command.add_argument("--baseline", default=BASELINES, metavar="A,B", help="baselines")
    command.add_argument("--schedule", default="auto", help="schedule whose gain is summarised")
    command.add_argument("--reps", type=int, default=5, help="repetitions")
    command.add_argument("--iters", type=int, default=4, help="iterations per repetition")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the reports")
    text = "record every baseline's timeline, not only the two fastest ones'"
    command.add_argument("--trace", action="store_true", help=text)
    text = "measure nothing; summarise the reports in --out"
    command.add_argument("--summary", action="store_true", help=text)
    return command.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        if not options.summary:
            if not 0 < options.batch < math.inf:
                raise ValueError(f"--batch: needs a share above 0, got {options.batch:g}")
            entries, cells = chosen(options.baseline), wanted(options)
            options.out.mkdir(parents=True, exist_ok=True)
            trace = "all" if options.trace else "best"
            effort = Effort(options.reps, options.iters, trace=trace, give_up=GIVE_UP)
            measure(cells, entries, effort, options.batch)
    except KeyboardInterrupt:
        print(f"{summary(options.out, options.schedule)}\n\ninterrupted: the same command goes on from here")
        return 130
    print(summary(options.out, options.schedule))
    return 0 if options.summary else max(exit_status(read(cell.path)) for cell in cells)


def wanted(options: argparse.Namespace) -> list[Wanted]:
    """Every cell of the table; names and numbers are checked before anything starts."""
    names = [models.spelt(name.strip()) for name in options.models.split(",")]
    hosts = numbers("--hosts", options.hosts, least=2)
    per_host = numbers("--per-host", options.per_host)
    ratios = numbers("--ratios", options.ratios, float, least=1e-9)
    shapes = [Shape(h, n) for h in hosts for n in per_host]
    return [Wanted(m, shape, r, options.out) for shape in shapes for m in names for r in ratios]


def measure(cells: Sequence[Wanted], entries: Sequence[Baseline], effort: Effort, batch: float = 1.0) -> None:
    """Measures the missing cells.

    All ratios of a model are measured on one cluster whose links change their speed, so that limits and peers
    are started and checked once.
    """
    missing = [cell for cell in cells if cell.missing]
    for cell in cells:
        if cell not in missing:
            check_kept(cell, job_of(cell.model, batch), suited(entries, cell.shape))
    with bars(44) as shown:
        if len(missing) < len(cells):
            there = f"{len(cells) - len(missing)} of {len(cells)} cells are there already"
            shown.console.print(there, highlight=False)
        watcher = Watcher(shown)
        for (shape, model), group in groupby(missing, key=lambda cell: (cell.shape, cell.model)):
            job, (hosts, per_host) = job_of(model, batch), shape
            with Cluster(hosts, "unlimited") as cluster, Crew() as crew:
                compute = compute_seconds(job, hosts * per_host)
                for cell in group:
                    link = link_for(cell.ratio, compute, estimate(job).parameters, hosts)
                    number = f"[{missing.index(cell) + 1}/{len(missing)}]"
                    shown.console.print(f"{number} {cell}: {link}", markup=False, highlight=False)
                    cluster.set_link(link)
                    place = Hosts(cluster, per_host=per_host)
                    report = Comparison(job, place, suited(entries, shape), effort, watcher, crew=crew).run()
                    keep(report, cell)
                    if report["interrupted"]:
                        raise KeyboardInterrupt
                    rows = [row for row in report["baselines"] if row["name"] == "local"]
                    compute = next((row["time"] for row in rows if "time" in row), compute)


def job_of(model: str, batch: float) -> Job:
    """``batch``: a share of the model's own one."""
    return Job(model, max(1, round(batch * models.spec(model).batch)))


def suited(entries: Sequence[Baseline], shape: Shape) -> list[Baseline]:
    return [entry for entry in entries if entry.per_host <= shape.per_host]


def check_kept(cell: Wanted, job: Job, entries: Sequence[Baseline]) -> None:
    """``ValueError`` for a cell that is there already, and was measured with other options."""
    report = read(cell.path)
    there, names = report["job"]["batch"], {row["name"] for row in report["baselines"]}
    said = "" if there == job.rank_batch else f"with a batch of {there}, and not of {job.rank_batch}"
    if lacks := [entry.name for entry in entries if entry.name not in names]:
        said = f"without {', '.join(lacks)}"
    if said:
        options = "the --batch and --baseline that it had, or another folder as --out"
        raise ValueError(f"{cell.path} was measured {said}: pass {options}")


def read(path: Path) -> Report:
    try:
        report: Report = read_json(path)
        _ = report["interrupted"], report["baselines"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is no report of a comparison: move it away, and measure it again"
        raise InputError(f"{what} ({error})") from None
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
    cells, notes, reasons = [], [], dict[str, list[str]]()
    for path in sorted(folder.glob("*_*hosts_*.json")):
        report = read(path)
        cell = cell_of(report, schedule)
        for line in absent(report):
            reasons.setdefault(line, []).append(path.name)
        if report["interrupted"]:
            notes.append(f"{path.name}: interrupted, left out")
        elif cell is None:
            notes.append(f"{path.name}: {schedule} was not measured, left out")
        else:
            cells.append(cell)
    cells.sort(key=lambda cell: (cell.shape, cell.ratio, cell.model))
    notes += [f"{line} ({len(names)} cells, first {names[0]})" for line, names in reasons.items()]
    return "\n\n".join([markdown(cells), *notes])


# -- from many comparisons to the few figures that decide, as Markdown. Pure functions of reports ------------

Report = dict[str, Any]
two = partial(shown, form=".2f")
Figures = dict[str, Any]  # of one baseline, as a report has them


@dataclass(frozen=True)
class Cell:
    """One comparison, seen from one schedule. Speed-ups are other / ours: above 1, ours is faster."""

    report: Report
    schedule: str
    model: str
    shape: Shape
    ratio: float  # of communication to compute, as wanted
    rows: dict[str, Figures]  # measured ones, by name

    @property
    def ratio_measured(self) -> float | None:
        wire, local = self.time("wire"), self.time("local")
        return wire / local if wire and local else None

    @property
    def best_peer(self) -> str | None:
        """The fastest within repetitions, of those that train as ours does."""
        rows = self.rows.items()
        peers = [name for name, row in rows if row["kind"] == "peer" and not row.get("changes")]
        return min(peers, key=lambda name: self.over(name) or 0.0, default=None)

    def time(self, name: str) -> float | None:
        return self.rows[name]["time"] if name in self.rows else None

    def to_limit(self, bounds: str) -> float | None:
        """Ratio to the larger of the floor and these bounds of the report, one of each repetition."""
        floors, known = self.rows.get("floor", {}).get("times"), self.report.get(bounds)
        return to_limit(self.rows[self.schedule]["times"], floors, known) if floors and known else None

    def megabytes(self, name: str | None) -> str:
        """What left each host per iteration."""
        sent = self.rows.get(name or "", {}).get("sent")
        return "" if sent is None else f"{sent / 1e6:.1f}"

    def over(self, name: str | None) -> float | None:
        """The median over repetitions, so that the machine's drift cancels."""
        if name not in self.rows:
            return None
        # A baseline that was given up has fewer repetitions.
        pairs = zip(self.rows[name]["times"], self.rows[self.schedule]["times"], strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def __str__(self) -> str:
        return f"{self.model}, {self.shape}, ratio {self.ratio:g}"


def link_for(ratio: float, compute: float, gradient_bytes: int, hosts: int) -> str:
    """The speed at which an all-reduce of the gradients takes `ratio` times the compute."""
    sent = 2 * (hosts - 1) / hosts * gradient_bytes
    rate = 8 * sent / (ratio * compute)
    return f"{max(1, round(rate / 1e6))}mbit"


def cell_of(report: Report, schedule: str) -> Cell | None:
    """The cell of a report; None where the schedule was not measured."""
    rows = {row["name"]: row for row in report["baselines"] if "time" in row}
    if schedule not in rows:
        return None
    place = report["place"]
    shape = Shape(place.get("hosts", place["ranks"]), place.get("per_host", 1))
    return Cell(report, schedule, report["job"]["model"], shape, report["ratio"], rows)


def means(cells: Sequence[Cell]) -> list[tuple[Shape, float, int, dict[str, float | None]]]:
    """(hosts and their ranks, ratio, models, geometric mean over the models by peer), in order."""
    groups: dict[tuple[Shape, float], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.shape, cell.ratio), []).append(cell)
    rows = []
    for (shape, ratio), group in sorted(groups.items()):
        over = {"best peer": _mean([cell.over(cell.best_peer) for cell in group])}
        over |= {name: _mean([cell.over(name) for cell in group]) for name in AS_THEY_COME}
        rows.append((shape, ratio, len(group), over))
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None


def accuracy(cells: Sequence[Cell]) -> list[str]:
    """The worst error of the simulator for each policy, and where."""
    lines = []
    names = dict.fromkeys(name for cell in cells for name, row in cell.rows.items() if row.get("predicted"))
    for name in names:
        errors = [
            (abs(cell.rows[name]["time"] / cell.rows[name]["predicted"] - 1), str(cell))
            for cell in cells
            if cell.rows.get(name, {}).get("predicted")
        ]
        worst, where = max(errors)
        usual = statistics.median(error for error, _ in errors)
        off = f"{worst:.1%} at worst ({where}), {usual:.1%} usually"
        lines.append(f"{name}: measured / predicted is off by {off}")
    return lines


def slowest(cells: Sequence[Cell]) -> str | None:
    """Name the cell in which the schedule gains least over the best peer."""
    known = [(gain, cell) for cell in cells if (gain := cell.over(cell.best_peer)) is not None]
    if not known:
        return None
    gain, cell = min(known, key=lambda pair: pair[0])
    return f"least gain over the best peer: {gain:.2f} ({cell}, {cell.best_peer})"


Column = tuple[str, Callable[[Cell], str]]  # a header, and the text in a cell's row
PLACE: list[Column] = [
    ("model", lambda cell: cell.model),
    ("hosts", lambda cell: cell.shape.label),
    ("ratio", lambda cell: f"{cell.ratio:g}"),
    ("link", lambda cell: ", ".join(sorted(set(cell.report["place"].get("links", ["none"]))))),
]
POLICIES = ("dear", "pipedap", "wfbp")


def markdown(cells: Sequence[Cell]) -> str:
    """Times, bytes, ratios, means, and what the simulator's predictions are worth."""
    if not cells:
        return "no cell has been measured yet"
    name = cells[0].schedule
    peers = [f"{peer} / `{name}`" for peer in ("best peer", *(f"`{peer}`" for peer in AS_THEY_COME))]
    header = ["hosts", "ratio", "models", *peers]
    mean_rows = [[s.label, f"{r:g}", count, *map(two, over.values())] for s, r, count, over in means(cells)]
    parts = [
        f"Milliseconds per iteration (in brackets: as predicted):\n\n{table(cells, times(name))}",
        "MB that left each host per iteration (least: what the limits `wire` and `floor` exchange):\n\n"
        + table(cells, megabytes(name)),
        f"Ratios (above 1, `{name}` is faster than the peer; limit: the larger of floor and bound):\n\n"
        + table(cells, ratios(name)),
        f"Geometric means over the models:\n\n{markdown_table(header, mean_rows)}",
    ]
    lines = [line for line in [slowest(cells)] if line]
    lines += accuracy(cells)
    lines += [f"{cell}: {doubt}" for cell in cells for doubt in cell.report.get("doubts", ())]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)])


def table(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    header = [name for name, _ in (*PLACE, *columns)]
    return markdown_table(header, [[text(cell) for _, text in (*PLACE, *columns)] for cell in cells])


def times(ours: str) -> list[Column]:
    policies = [ours, *(name for name in POLICIES if name != ours)]
    return [
        ("local", lambda cell: ms(cell.time("local"))),
        ("floor", lambda cell: ms(cell.time("floor"))),
        ("bound, compute alone", lambda cell: ms(cell.report.get("bound"))),
        ("bound, beside traffic", lambda cell: ms(cell.report.get("bound_beside"))),
        *((f"`{name}`", partial(predicted, name=name)) for name in policies),
        (
            "best tuned peer",
            lambda cell: f"{ms(cell.time(best))} `{best}`" if (best := cell.best_peer) else "",
        ),
        *((f"`{name}`", lambda cell, name=name: ms(cell.time(name))) for name in AS_THEY_COME),
    ]


def megabytes(ours: str) -> list[Column]:
    return [
        ("least", lambda cell: cell.megabytes("wire")),
        (f"`{ours}`", lambda cell: cell.megabytes(ours)),
        ("best tuned peer", lambda cell: cell.megabytes(cell.best_peer)),
        *((f"`{name}`", lambda cell, name=name: cell.megabytes(name)) for name in AS_THEY_COME),
    ]


def ratios(ours: str) -> list[Column]:
    return [
        ("communication / compute, measured", lambda cell: two(cell.ratio_measured)),
        (f"`{ours}` / limit, compute alone", lambda cell: two(cell.to_limit("bounds"))),
        (f"`{ours}` / limit, beside traffic", lambda cell: two(cell.to_limit("bounds_beside"))),
        (f"best peer / `{ours}`", lambda cell: two(cell.over(cell.best_peer))),
        *((f"`{name}` / `{ours}`", lambda cell, name=name: two(cell.over(name))) for name in AS_THEY_COME),
    ]


def predicted(cell: Cell, name: str) -> str:
    told = ms(cell.rows.get(name, {}).get("predicted"))
    return ms(cell.time(name)) + (f" ({told})" if told else "")
