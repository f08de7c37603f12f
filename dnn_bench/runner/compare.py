"""`python -m dnn_bench compare`: any baselines side by side on one model.

Every baseline's ranks are started and checked, and timed in turn (A B C A B C ...).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dnn_bench import models
from dnn_bench.baselines import AS_THEY_COME, LIMIT, OURS, PEER, ROUNDED, Baseline, MissingPeer, require
from dnn_bench.baselines.trainer import Job, check_fit
from dnn_bench.command_line import add_data_dir, add_job, check_least, one_line_errors, parser, save, shape_of
from dnn_bench.launch import Place, add_place, place_of
from dnn_bench.report import page
from dnn_bench.runner import results
from dnn_bench.runner.results import FAILED, MISSING, OK, WRONG, Row, fastest, paired_ratio
from dnn_bench.runner.sets import Crew, RankFailed, RankSet

# -- the command ---------------------------------------------------------------------------------------------

LIMITS = ["local", "floor", "wire"]  # measured always: the ratios and the shares need them


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "compare",
        "Trains one model with several baselines side by side on an emulated cluster. Each one's first steps "
        "are checked against one process before it is timed; repetitions are interleaved (A B C A B C ...).",
    )
    add_job(command, model="mlp", baseline="all")
    add_data_dir(command)
    add_place(command, link="250mbit")
    command.add_argument("--reps", type=int, default=5, help="repetitions of every baseline")
    command.add_argument("--iters", type=int, default=5, help="iterations per repetition")
    command.add_argument("--warmup", type=int, default=1, help="untimed iterations before each repetition")
    command.add_argument("--no-trace", action="store_true", help="record no timelines")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts to this file")
    return command.parse_args(arguments)


@one_line_errors(ValueError)
def main(arguments: list[str]) -> int:
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
    found: dict[str, Baseline] = {}
    for entry in entries:
        if found.setdefault(entry.name, entry) != entry:
            folder = entry.name.partition("@")[2]
            raise ValueError(f"two checkouts lie in folders called {folder}: rename one of them")
    return list(found.values())


def check_writable(path: Path) -> None:
    """Fail before the measurement if a file cannot be written."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name a file in a folder that exists and is yours")


def job_of(options: argparse.Namespace) -> Job:
    check_least(options, 0, "batch_size", "warmup")
    check_least(options, 1, "reps", "iters", "threads")
    shape = shape_of(options)
    if unknown := set(shape) - set(models.spec(options.model).shape):
        raise ValueError(f"{options.model} has no {' or '.join(sorted(unknown))}")
    job = Job(options.model, options.batch_size, shape, threads=options.threads, data_dir=options.data_dir)
    if job.data_dir:
        job.sample(1, 0)  # a folder that cannot be used is refused before anything starts
    return job


# -- the comparison ------------------------------------------------------------------------------------------

VERSION = 1
# The fewest iterations between the check, which warms up too, and the first measurement. Ours then go on
# until they have measured, searched a plan and tried it beside DDP's way: how many steps a search takes
# depends on the processors that are free.
SETTLE = {OURS: 1, ROUNDED: 40, LIMIT: 3}
SETTLE_STEPS, SETTLE_SECONDS = 400, 300.0  # the most before it is timed although it searches still
ENOUGH = 2  # repetitions before a slow peer is given up
TRIES = 4  # of one measurement, as long as others on the physical machine disturb it
MEMORY_SHARE = 0.8  # of the free memory; beyond it baselines are started one at a time


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    repetitions: int = 5
    iterations: int = 5
    warmup: int = 1
    trace: str = "all"  # "none", or "best": the fastest of ours and the fastest peer
    give_up: float | None = None  # a tuned peer that takes so many times the best one's time is timed no more


def settled(ranks: RankSet, least: int) -> bool:
    """Let ranks train at least so many iterations, until they search no plan; return whether they do not.

    A few iterations at a time: ranks train equally many, whatever the time, and none takes long to answer.
    """
    begin, done, few = time.monotonic(), 0, max(least, 20)
    while not all(ranks.call("settle", least if not done else 0, few)):
        done += few
        if done >= SETTLE_STEPS or time.monotonic() - begin > SETTLE_SECONDS:
            return False
    return True


def compare(job: Job, place: Place, entries: Sequence[Baseline], effort: Effort) -> dict[str, Any]:
    """The report of one comparison, also of an interrupted one; shows its progress."""
    with bars(24) as progress:
        return Comparison(job, place, entries, effort, Watcher(progress)).run()


@dataclass
class Comparison:
    """One comparison; `run` gives the report, also when it is interrupted."""

    job: Job
    place: Place
    entries: Sequence[Baseline]
    effort: Effort
    watcher: Watcher
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False
    measured: results.Measured = field(default_factory=lambda: defaultdict(list))
    crew: Crew | None = None  # whose ranks may stay for the next comparison; without one, none do
    _doubts: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        with ExitStack() as stack:
            self._crew = self.crew or stack.enter_context(Crew())
            self._need = check_fit(self.job, self.place.size)
            new = [entry for entry in self.entries if entry.name not in self._crew]
            timings = len(self.entries) * self.effort.repetitions
            self._spare = timings  # measurements that may be taken again: at most, all takes twice as long
            self.watcher.begin(2 * len(new) + timings)
            together = True
            try:
                self._crew.reference(self.job, self.place.size)  # a job that cannot be trained ends here
                together = self._measure_together()
                if not together:
                    for entry in self.entries:
                        self._measure([entry], self.effort.repetitions)
                        self._crew.dismiss(lambda ranks: True)
            except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or a signal that a cluster turned into an exit
                self.interrupted = True
        return self.report(together)

    def _measure_together(self) -> bool:
        """Measures all in turn; False if memory is too short, even with the best of the tuned peers only."""
        entries = list(self.entries)
        if not self._fit(entries):
            tuned = [entry for entry in entries if self._may_be_given_up(entry)]
            entries = [entry for entry in entries if entry not in tuned]
            if not tuned or not self._fit([*entries, tuned[0]]) or not self._fit(tuned):
                return False
            entries += self._best_of(tuned)
        self._measure(entries, self.effort.repetitions)
        return True

    def _fit(self, entries: Sequence[Baseline]) -> bool:
        """Whether the ranks of these baselines fit into memory together; one baseline computes at a time."""
        new = [entry for entry in entries if entry.name not in self._crew]
        activations = self._need.rank(self.job.rank_batch) - self._need.rank()
        need = self.place.size * (len(new) * self._need.rank() + activations)
        return need < MEMORY_SHARE * psutil.virtual_memory().available

    def _best_of(self, tuned: Sequence[Baseline]) -> list[Baseline]:
        """The fastest of them in a few repetitions, to be timed again among all; the others end here."""
        self._measure(tuned, min(ENOUGH, self.effort.repetitions))
        rows = [row for row in self.rows if row.measured]
        best = fastest(rows, PEER)
        if best is None:
            return []
        for row in rows:
            if row is not best:
                row.reason = f"timed apart, at {paired_ratio(row, best):.2f} times {best.name}"
        self._crew.dismiss(lambda ranks: ranks.baseline in tuned and ranks.baseline.name != best.name)
        self.rows.remove(best)
        return [entry for entry in tuned if entry.name == best.name]

    def _measure(self, entries: Sequence[Baseline], repetitions: int) -> None:
        """Measures these baselines in turn. Ours do not stay, since they have planned for this link; nor does
        one whose operations were recorded: what records them (DDP's hook) stays, and costs time.
        """
        ready: list[tuple[Row, RankSet]] = []
        try:
            for entry in entries:
                row = Row(entry.name, entry.kind, changes=entry.changes, searches=entry.searches)
                self.rows.append(row)
                ranks = self._crew.ranks(entry, self.job, self.place)
                if self._prepare(row, ranks):
                    ready.append((row, ranks))
            for _ in range(repetitions):
                for row, ranks in ready:
                    if not row.reason:
                        self.watcher.step(f"timing {row.name}")
                        self._turn(row, ranks, self._time)
                self._give_up_slow_peers([row for row, _ in ready])
            for row, ranks in ready:
                # Only the engine knows the links that it uses: two tiers or flat. Peers predict nothing.
                self._turn(
                    row, ranks, lambda row, ranks: setattr(row, "predicted", ranks.call("prediction")[0])
                )
                if self._worth_a_trace(row):
                    self._turn(row, ranks, lambda row, ranks: setattr(row, "trace", ranks.call("trace")[0]))
        finally:
            stay = (row for row in self.rows if row.kind in (LIMIT, PEER) and row.status == OK)
            staying = {row.name for row in stay if not row.recorded}
            self._crew.dismiss(lambda ranks: ranks.baseline.name not in staying)

    def _may_be_given_up(self, entry: Baseline | Row) -> bool:
        tuned = entry.kind == PEER and entry.name not in AS_THEY_COME
        return tuned and self.effort.give_up is not None

    def _give_up_slow_peers(self, rows: Sequence[Row]) -> None:
        """Tuned peers are there to find the best one: those that cannot be it are timed no more."""
        best = fastest(rows, PEER)
        if best is None or self.effort.give_up is None or len(best.repetitions) < ENOUGH:
            return
        for row in rows:
            ratio = paired_ratio(row, best) if row.measured and self._may_be_given_up(row) else None
            if ratio is not None and ratio > self.effort.give_up and not row.reason:
                row.reason = f"timed {len(row.repetitions)} times only, at {ratio:.2f} times {best.name}"

    def _prepare(self, row: Row, ranks: RankSet) -> bool:
        """Starts, checks and settles a baseline; False, with the reason in the row, if it cannot be timed."""
        if ranks.connections:  # they stayed, and have been checked
            row.error = self._crew.errors[row.name]
            return True
        self.watcher.step(f"starting {row.name}")
        try:
            require(ranks.baseline, self.job, self.place.per_host)
            ranks.start()
        except MissingPeer as error:
            row.status, row.reason = MISSING, str(error)
            return False
        except RankFailed as error:
            row.status, row.reason = FAILED, str(error)
            return False
        self.watcher.step(f"checking {row.name}")
        self._turn(row, ranks, self._check)
        self._crew.errors[row.name] = row.error
        return row.status == OK

    def _check(self, row: Row, ranks: RankSet) -> None:
        if ranks.baseline.exact:
            reference = self._crew.reference(ranks.baseline.compared(self.job), self.place.size)
            row.error, row.reason = ranks.call("check", str(reference))[0]
            if row.reason:
                row.status = WRONG
                return
        if (least := SETTLE.get(row.kind, 0)) and not settled(ranks, least):
            self._doubts.append(f"{row.name} was timed while its plan was still searched or tried")

    def _time(self, row: Row, ranks: RankSet) -> None:
        blocks, stolen = self._undisturbed(row, ranks, "block", self.effort.warmup, self.effort.iterations)
        row.repetitions.append(blocks)
        row.stolen.append(stolen)
        if more := results.MEASURED.get(row.name):
            self.measured[row.name].append(self._undisturbed(row, ranks, *more)[0])

    def _undisturbed(
        self, row: Row, ranks: RankSet, command: str, *arguments: Any
    ) -> tuple[list[Any], float]:
        def again(share: float) -> None:
            self._spare -= 1
            self.watcher.more(f"timing {row.name} again: others took {share:.0%} of the processors' time")

        # The link decides how long the wire takes; that processors wake up late meanwhile counts as stolen.
        tries = 1 if row.name == "wire" else min(TRIES, 1 + self._spare)
        return results.least_disturbed(lambda: ranks.call(command, *arguments), tries, again)

    def _worth_a_trace(self, row: Row) -> bool:
        if row.name == "wire" or row.kind == ROUNDED:
            return False
        if self.effort.trace == "best":
            return row.kind in (OURS, PEER) and row is fastest(self.rows, row.kind)
        return self.effort.trace == "all"

    def _turn(self, row: Row, ranks: RankSet, act: Callable[[Row, RankSet], None]) -> None:
        """Lets one baseline run while the others are stopped; a failure concerns only its row."""
        if row.status == FAILED:
            return
        ranks.resume()
        try:
            act(row, ranks)
        except RankFailed as error:
            row.status, row.reason = FAILED, str(error)
            ranks.close()
        finally:
            ranks.pause()

    def report(self, together: bool) -> dict[str, Any]:
        """Everything measured so far, as JSON-ready data."""
        order = [entry.name for entry in self.entries]
        self.rows.sort(key=lambda row: order.index(row.name))
        predictions = results.predictions(self.measured, self.rows, self.place.size, self.place.per_host)
        predictions["doubts"] += [*self._doubts, *results.disturbances(self.rows)]
        samples = self.place.size * self.job.rank_batch
        bounds = predictions["bounds"]
        return {
            "version": VERSION,
            "kind": "compare",
            "interrupted": self.interrupted,
            "environment": results.describe_machine(),
            "job": {**asdict(self.job), "batch": self.job.rank_batch},
            "place": self.place.describe(),
            "effort": {**asdict(self.effort), "interleaved": together},
            **predictions,
            "baselines": results.summarise(self.rows, samples=samples, bounds=bounds, rate=self.place.rate),
        }


# -- shows the progress of comparisons on standard error: bars on a terminal, otherwise lines ----------------


def bars(width: int) -> Progress:
    """Bars whose descriptions have this width; invisible where standard error is no terminal."""
    errors = Console(stderr=True)
    what = TextColumn(f"{{task.description:<{width}}}")
    columns = what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


class Watcher:
    """Gets the steps of a comparison; `total` is their number, `more` a further try of the last one."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.total, self.done = progress, 0, 0
        self.task = progress.add_task("starting", total=None)

    def begin(self, total: int) -> None:
        self.total, self.done = total, 0
        self.progress.reset(self.task, total=total)

    def step(self, what: str) -> None:
        self.done += 1
        self.more(what)

    def more(self, what: str) -> None:
        # A step is announced when it begins.
        self.progress.update(self.task, completed=self.done - 1, description=what)
        if not self.progress.console.is_terminal:
            print(f"[{self.done}/{self.total}] {what}", file=sys.stderr, flush=True)
