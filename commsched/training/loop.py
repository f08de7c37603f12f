"""Training by epochs: pipelines for jobs, the loop, and figures of the run."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

import commsched
from commsched.collectives.carrier import carrier
from commsched.pipeline import Chain, Job, Pipeline
from commsched.pipeline.job import Data
from commsched.pipeline.shares import most_replicas
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.pipelines.schedules import bundle_ranks, bundle_ranks_across

# -- pipelines for jobs: of a plan, of a schedule's name, or of one stage, which takes any model -------------

_WHOLE = "0."
"""Before the names of a model that is the only element of a chain."""


def pipeline_of(
    job: Job,
    plan: PipelinePlan | None = None,
    *,
    schedule: str = "1f1b",
    stages: int | None = None,
    replicas: int | Sequence[int] = 1,
    microbatches: int = 1,
    cuts: Sequence[int | str] | None = None,
    across: bool = False,
    on_step: Any = None,
) -> Pipeline:
    """This rank's part. ``stages`` by default as many as ranks and replicas leave. ``across``: a bundle's
    fronts and rears are on different hosts.
    """
    common: dict[str, Any] = {
        "loss": job.loss,
        "count": job.count,
        "optimizer": job.optimizer,
        "on_step": on_step,
        "master_weights": job.master_weights,
        "compression": job.compression,
    }
    if plan is not None:
        return Pipeline(job.model, plan=plan, **common)
    size = commsched.size()
    if stages is None:
        stages = len(replicas) if isinstance(replicas, Sequence) else size // replicas
        if isinstance(replicas, int) and stages * replicas != size:
            raise ValueError(f"{size} ranks do not divide into {replicas} replicas; set --stages, --replicas")
    if stages > 1 and schedule == "bundle":
        common |= _bundles(across)
    if stages > 1:
        return Pipeline(job.model, schedule, microbatches, (stages, replicas), cuts=cuts, **common)
    if cuts and list(cuts) != [0]:
        raise ValueError(f"one stage has no cuts, got {list(cuts)}; set --stages, or start more ranks")
    # The whole model is one layer: it need not be traced. Without stages every schedule is this one.
    whole = Chain([job.model], elements=True)
    return Pipeline(whole, "gpipe", microbatches, (1, replicas), **common)


def _bundles(across: bool) -> dict[str, Any]:
    """The ranks of fronts and rears, and the groups of ranks that sum gradients on their own host first."""
    nodes = commsched.allgather_object(carrier().launch.node)
    hosts = [[rank for rank, node in enumerate(nodes) if node == each] for each in dict.fromkeys(nodes)]
    if len({len(host) for host in hosts}) > 1 or hosts != sorted(hosts) or len(nodes) % 2:
        raise ValueError(
            f"bundles need equally many ranks on each host, an even number in all; the hosts have {hosts}"
        )
    count, each = len(hosts), len(hosts[0])
    if across:
        return {"ranks": bundle_ranks_across(count, each), "hosts": hosts}
    if each % 2:
        raise ValueError(
            f"each host needs a front and a rear, and has {each} ranks; use --across for fronts and rears on"
            " different hosts"
        )
    return {"ranks": bundle_ranks(count, (each // 2, each // 2)), "hosts": hosts}


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """The whole model's state_dict, as the job's own model has it; every rank must call."""
    state = pipeline.state_dict()
    if pipeline.layout.stages > 1 or not all(name.startswith(_WHOLE) for name in state):
        return state
    return {name.removeprefix(_WHOLE): value for name, value in state.items()}


# -- the loop: each rank reads its rows, test data are scored, checkpoints continue to the bit ---------------


@dataclass(frozen=True)
class TrainingSettings:
    """``rows``: of one step over all replicas. ``every``: steps between checkpoints; 0: one each epoch."""

    rows: int
    epochs: int
    evaluate: bool = True
    workers: int = 0
    seed: int = 0
    checkpoint: Path | None = None
    every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("epochs", 1), ("workers", 0), ("every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class Training:
    """One rank's training run; every rank makes the same one."""

    def __init__(self, pipeline: Pipeline, data: Data, settings: TrainingSettings) -> None:
        self.pipeline, self.data, self.settings = pipeline, data, settings
        self.epochs: list[Epoch] = []
        # Mirrored replicas need whole batches on every rank.
        self.local = not pipeline.layout.mirror
        size = len(cast(Sized, data.train))
        self.sampler = pipeline.sampler(
            cast(Sized, data.train),
            settings.rows,
            seed=settings.seed,
            drop_last=size >= settings.rows and size % settings.rows < _least(pipeline),
            local=self.local,
        )
        self._total, self._told, self._seconds = 0.0, 0, 0.0  # of this epoch: losses, their number, time
        self._steps = 0
        self._saving: commsched.Saving | None = None

    def run(self) -> list[Epoch]:
        """Train from the newest checkpoint on; return the figures of all epochs.

        After SIGTERM on any rank, every rank writes a checkpoint after the same step and exits.
        """
        self._resume()
        loader = DataLoader(self.data.train, batch_sampler=self.sampler, num_workers=self.settings.workers)
        with termination(self.settings.checkpoint is not None) as asked:
            while self.sampler.epoch < self.settings.epochs:
                self._epoch(loader, asked)
        if self._saving is not None:
            self._saving.wait()
        return self.epochs

    def _epoch(self, loader: DataLoader[Any], asked: Callable[[], bool]) -> None:
        number, start, leaves = self.sampler.epoch, time.perf_counter(), False
        label, shown = f"epoch {number + 1}/{self.settings.epochs}", self.pipeline.rank == 0
        with progress(label, len(self.sampler), self.sampler.position, shown) as advance:
            for batch in loader:
                self._tell(self.pipeline.step(batch, local=self.local))
                self._steps += 1
                advance("" if not self._told else f"loss {self._total / self._told:.4f}")
                every, leaves = self.settings.every, asked()
                due = leaves or (every and self._steps % every == 0)
                if due and self.sampler.epoch == number:  # else the epoch is finished first
                    self._seconds += time.perf_counter() - start
                    self._save()
                    start = time.perf_counter()
                    if leaves:
                        self._leave()
        if self.sampler.epoch >= self.settings.epochs:
            for loss in self.pipeline.drain():
                self._tell(loss)
        self._seconds += time.perf_counter() - start
        self._finish(number)
        self._save()
        if leaves:
            self._leave()

    def _tell(self, loss: float | None) -> None:
        """Of an asynchronous pipeline a step's loss comes later, perhaps in the next epoch."""
        if loss is not None:
            self._total, self._told = self._total + loss, self._told + 1

    def _finish(self, number: int) -> None:
        epoch: Epoch = {
            "epoch": number + 1,
            "loss": self._total / max(1, self._told),
            "steps": len(self.sampler),
            "seconds": self._seconds,
            "rows_per_second": self.sampler.epoch_rows / self._seconds,
            "test": self.test(),
        }
        self.epochs.append(epoch)
        self._total, self._told, self._seconds = 0.0, 0, 0.0
        if self.pipeline.rank == 0:
            print(described(epoch, self.settings.epochs), flush=True)

    def test(self) -> dict[str, float]:
        """Scores of the test data with the newest weights."""
        test, measure = self.data.test, self.data.measure
        if not self.settings.evaluate or test is None or measure is None:
            return {}
        sampler = _TestRows(self.pipeline, len(cast(Sized, test)), self.settings.rows, self.local)
        # A loader draws a seed for workers: not from the training's random numbers.
        loader = DataLoader(
            test, batch_sampler=sampler, num_workers=self.settings.workers, generator=torch.Generator()
        )
        total = None
        for batch, local in zip(loader, sampler.local, strict=True):
            counted = self.pipeline.evaluate(batch, measure.count, local=local)
            total = counted if total is None else total + counted
        return {} if total is None else measure.scores(total)

    # Checkpoints

    def _save(self) -> None:
        if self.settings.checkpoint is not None:
            so_far = self._total, self._told, self._seconds, self._steps
            state = {"pipeline": self.pipeline, "epochs": self.epochs, "so_far": so_far}
            self._saving = commsched.save(state, self.settings.checkpoint)

    def _resume(self) -> None:
        folder = self.settings.checkpoint
        state = None if folder is None else commsched.load({"pipeline": self.pipeline}, folder)
        if state is None:
            return
        self.epochs = state["epochs"]
        self._total, self._told, self._seconds, self._steps = state["so_far"]
        if self.pipeline.rank == 0:
            print(f"continues after step {self._steps} of {folder}", flush=True)

    def _leave(self) -> None:
        assert self._saving is not None
        self._saving.wait()
        self.pipeline.close()
        if self.pipeline.rank == 0:
            print(f"SIGTERM: step {self._steps} is saved in {self.settings.checkpoint}", flush=True)
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def termination(watched: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells after each step, alike on all ranks, whether one of them got SIGTERM.

    The answer travels beside the next step, so that none waits for it: it is about the call before.
    """
    if not watched:
        yield lambda: False
        return
    received: list[int] = []
    under_way: list[int] = []

    def asked() -> bool:
        answer = bool(under_way and commsched.synchronize(under_way.pop()))
        mine = torch.tensor([len(received)])
        under_way.append(commsched.allreduce_async(mine, op=commsched.Max, name="commsched.train.terminated"))
        return answer

    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(label: str, total: int, done: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function to call after each step with a text, which a bar on a terminal shows."""
    if not shown or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, completed=done, text="")
        yield lambda text: bar.update(task, advance=1, text=text)


class Decay:
    """``on_step`` of a pipeline: the rate falls to 0 over ``steps``, on a line or a half cosine."""

    def __init__(self, kind: str, steps: int) -> None:
        self.kind, self.steps = kind, steps

    def __call__(self, optimizer: Optimizer, number: int) -> None:
        left = max(0.0, 1 - number / self.steps)
        part = left if self.kind == "linear" else (1 - math.cos(math.pi * left)) / 2
        for group in optimizer.param_groups:
            # Under the name that torch's schedulers use; checkpoints hold it.
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * part


def _least(pipeline: Pipeline) -> int:
    """The rows of a step in which every replica has one of every micro-batch."""
    return pipeline.layout.microbatches * most_replicas(pipeline.layout)


class _TestRows(Sampler[list[int]]):
    """All rows of the test data in their order; a batch that is too small to share goes to every rank."""

    def __init__(self, pipeline: Pipeline, size: int, rows: int, local: bool) -> None:
        least = _least(pipeline)
        self._steps = [range(first, min(first + rows, size)) for first in range(0, size, rows)]
        self.local = [local and len(step) >= least for step in self._steps]
        self._pipeline = pipeline

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step, local in zip(self._steps, self.local, strict=True):
            mine = self._pipeline.rows(len(step)) or [0] if local else range(len(step))
            yield [step[row] for row in mine]


# -- figures of a training run as JSON, and its curves as an SVG picture that needs no other library ---------

Epoch = dict[str, Any]
"""Of an epoch: ``epoch`` (from 1 on), ``loss``, ``steps``, ``seconds``, ``rows_per_second``, ``test``."""

_WIDE, _HIGH, _EDGE, _TOP = 380, 260, 50, 40
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756")


def described(epoch: Epoch, epochs: int) -> str:
    """One line for the terminal."""
    scores = "".join(f", test {name} {value:.4f}" for name, value in epoch["test"].items())
    return (
        f"epoch {epoch['epoch']}/{epochs}: loss {epoch['loss']:.4f}{scores}, {epoch['seconds']:.1f} s,"
        f" {epoch['rows_per_second']:.1f} rows per second"
    )


def write(folder: Path, facts: Mapping[str, Any], epochs: Sequence[Epoch]) -> None:
    """Writes ``results.json`` and ``curves.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**facts, "epochs": list(epochs)}, indent=1) + "\n")
    (folder / "curves.svg").write_text(curves(epochs))


def curves(epochs: Sequence[Epoch]) -> str:
    """A panel for the losses, and one for the other scores of the test data."""
    numbers = [epoch["epoch"] for epoch in epochs]
    losses = {"training": [epoch["loss"] for epoch in epochs]}
    scores: dict[str, list[float]] = {}
    for epoch in epochs:
        for name, value in epoch["test"].items():
            lines, line = (losses, "test") if name == "loss" else (scores, name)
            lines.setdefault(line, []).append(value)
    panels = [("loss", losses), *([("test data", scores)] if scores else [])]
    drawn = [_panel(title, lines, numbers, _WIDE * place) for place, (title, lines) in enumerate(panels)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE * len(panels)}" height="{_HIGH}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"])


def _panel(title: str, lines: Mapping[str, Sequence[float]], numbers: Sequence[int], left: int) -> str:
    values = [value for line in lines.values() for value in line]
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1.0
    room, tall = _WIDE - 2 * _EDGE, _HIGH - 2 * _TOP
    span = max(1, numbers[-1] - numbers[0])

    def at(number: int, value: float) -> tuple[float, float]:
        x = left + _EDGE + (number - numbers[0]) / span * room
        return x, _TOP + (high - value) / (high - low) * tall

    parts = [f'<text x="{left + _EDGE}" y="16" font-size="13">{escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        x, y = at(numbers[0], value)
        parts.append(f'<line x1="{x}" x2="{x + room}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number in sorted({numbers[0], numbers[-1]}):
        x, y = at(number, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">epoch {number}</text>')
    for place, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[place % len(_COLOURS)]
        spots = [at(number, value) for number, value in zip(numbers, line, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in spots]
        label = f"{name} {line[-1]:.4g}"
        parts.append(f'<text x="{left + _EDGE + 110 * place}" y="32" fill="{colour}">{escape(label)}</text>')
    return "\n".join(parts)
