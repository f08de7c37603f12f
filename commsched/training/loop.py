"""Training by epochs: each rank reads its rows, test data are scored, checkpoints continue to the bit."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from commsched.pipeline import Pipeline
from commsched.pipeline.job import Data
from commsched.training.checkpoints import Checkpoints
from commsched.training.results import Epoch, described


@dataclass(frozen=True)
class Settings:
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

    def __init__(self, pipeline: Pipeline, data: Data, settings: Settings) -> None:
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
        self._files = None if settings.checkpoint is None else Checkpoints(settings.checkpoint)

    def run(self) -> list[Epoch]:
        """Trains from the latest checkpoint on; the figures of all epochs."""
        self._resume()
        loader = DataLoader(self.data.train, batch_sampler=self.sampler, num_workers=self.settings.workers)
        while self.sampler.epoch < self.settings.epochs:
            self._epoch(loader)
        return self.epochs

    def _epoch(self, loader: DataLoader[Any]) -> None:
        number, start = self.sampler.epoch, time.perf_counter()
        label, shown = f"epoch {number + 1}/{self.settings.epochs}", self.pipeline.rank == 0
        with progress(label, len(self.sampler), self.sampler.position, shown) as advance:
            for batch in loader:
                self._tell(self.pipeline.step(batch, local=self.local))
                self._steps += 1
                advance("" if not self._told else f"loss {self._total / self._told:.4f}")
                every = self.settings.every
                if every and self._steps % every == 0 and self.sampler.epoch == number:
                    self._seconds += time.perf_counter() - start
                    self._save()
                    start = time.perf_counter()
        if self.sampler.epoch >= self.settings.epochs:
            for loss in self.pipeline.drain():
                self._tell(loss)
        self._seconds += time.perf_counter() - start
        self._finish(number)
        self._save()

    def _tell(self, loss: float | None) -> None:
        """Of an asynchronous pipeline a step's loss comes later, perhaps in the next epoch."""
        if loss is not None:
            self._total, self._told = self._total + loss, self._told + 1

    def _finish(self, number: int) -> None:
        found: Epoch = {
            "epoch": number + 1,
            "loss": self._total / max(1, self._told),
            "steps": len(self.sampler),
            "seconds": self._seconds,
            "rows_per_second": len(self.sampler) * self.settings.rows / self._seconds,
            "test": self.test(),
        }
        self.epochs.append(found)
        self._total, self._told, self._seconds = 0.0, 0, 0.0
        if self.pipeline.rank == 0:
            print(described(found, self.settings.epochs), flush=True)

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
        if self._files is not None:
            state = {
                "pipeline": self.pipeline.checkpoint(),
                "epochs": list(self.epochs),
                "so_far": (self._total, self._told, self._seconds, self._steps),
            }
            self._files.save(self._steps, state)

    def _resume(self) -> None:
        state = None if self._files is None else self._files.load()
        if state is None:
            return
        self.pipeline.resume(state["pipeline"])
        self.epochs = list(state["epochs"])
        self._total, self._told, self._seconds, self._steps = state["so_far"]
        if self.pipeline.rank == 0:
            print(f"continues after step {self._steps} of {self.settings.checkpoint}", flush=True)


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
            group["lr"] = optimizer.defaults["lr"] * part


def _least(pipeline: Pipeline) -> int:
    """The rows of a step in which every replica has one of every micro-batch."""
    layout = pipeline.layout
    return layout.microbatches * max(layout.replicas(stage) for stage in range(layout.stages))


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
