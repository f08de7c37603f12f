"""Single-process training on the whole batch, and the comparison of a baseline with it.

The single process is trained twice, the second time with its ranks in the other order and other last bits in
every gradient: deep networks with batch norm are chaotic, and baselines are compared before rounding has
grown too large. They are compared closely after the first step, whose forward is the same everywhere; later,
a ReLU's input on the other side of zero moves a tensor's gradient by a hundredth.

The error is the share by which updates must be off to explain the distance of the weights: a small learning
rate moves many weights by less than their last bit, so distances alone would measure rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnn_bench.baselines.trainer import Job, Trainer

STEPS = 3  # at most
SMALL = 1e-3  # a tensor that moves less than this share of the average one is judged by the average
FEW = 8  # weights of a tensor that may be off by their last bit, however unlikely that is
TOLERANCE = 1e-3  # of a tensor's move
MARGIN = 10  # times the error of another order of sums are allowed too
CHAOS = 2e-2  # of a tensor's move by another order of sums: this step is not compared
KINK = 5e-2  # tolerance after the first step: another order of sums may have crossed a ReLU's kink

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """The share by which a baseline's updates are off the single process's, in the worst tensor."""

    error: float
    tensor: str
    tolerance: float = TOLERANCE

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance

    def complaint(self, steps: int) -> str:
        """Say what is wrong after this many steps."""
        return (
            f"{self.tensor} is off by {self.error:.1e} of its change after {steps} steps, and rounding"
            f" explains at most {self.tolerance:.1e}"
        )


@dataclass(frozen=True)
class Reference:
    """A single process's parameters before and after so many steps, and how far from them is right."""

    before: Parameters
    after: Parameters
    steps: int = STEPS
    tolerance: float = TOLERANCE

    def compare(self, actual: Parameters) -> Verdict:
        """Return the error of the worst tensor."""
        if missing := sorted(set(self.after) - set(actual)):
            return Verdict(float("inf"), missing[0], self.tolerance)
        moves = {name: _double(self.after[name]) - _double(self.before[name]) for name in self.after}
        norms = {name: _norm(move) for name, move in moves.items()}
        least = SMALL * sum(norms.values()) / len(norms)
        # The distance of each element to the neighbouring number of its type, or up to twice that.
        bits = {n: _double(v).abs() * torch.finfo(v.dtype).eps for n, v in self.after.items()}
        errors = {
            name: _share(_double(actual[name]) - _double(after), moves[name], bits[name], least)
            for name, after in self.after.items()
        }
        worst = max(errors, key=lambda name: errors[name])
        return Verdict(errors[worst], worst, self.tolerance)


def train_alone(job: Job, size: int) -> list[Reference]:
    """Steps on the batches of `size` ranks in one process: what baselines are compared with, in this order.

    The batch goes through rank by rank, with the gradients averaged: for most models that is the gradient of
    the whole batch, and where it is not (batch norm) it is what data-parallel training means.
    """
    torch.set_num_threads(job.threads)
    before = _copies(job.build_model().named_parameters())
    references: list[Reference] = []
    for step, (one, other) in enumerate(zip(_steps(job, size), _steps(job, size, True), strict=True), 1):
        rounding = Reference(before, one).compare(other).error
        if references and rounding > CHAOS:
            break
        tolerance = max(KINK if references else TOLERANCE, MARGIN * rounding)
        # Only the first step is kept, and the last one so far.
        references[1:] = [Reference(before, _copies(one.items()), step, tolerance)]
    return references


def _steps(job: Job, size: int, other: bool = False) -> Iterator[Parameters]:
    """The parameters after each step; the next one changes them.

    ``other``: the last rank comes first, and every gradient's last bit is another.
    """
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in job.global_batch(step, size)[:: -1 if other else 1]:
            (job.loss(model(inputs), targets) / size).backward()
        if other:
            for gradient in (p.grad for p in model.parameters() if p.grad is not None):
                gradient.mul_(1 + torch.finfo(gradient.dtype).eps)
        optimizer.step()
        yield {name: value.detach() for name, value in model.named_parameters()}


def _copies(parameters: Iterable[tuple[str, Tensor]]) -> Parameters:
    return {name: value.detach().clone() for name, value in parameters}


def check(trainer: Trainer, references: Sequence[Reference]) -> tuple[float, str] | None:
    """Make the references' steps under a baseline; rank 0 returns the largest error, and what is wrong."""
    done, errors, wrong = 0, [], []
    for reference in references:
        for step in range(done, reference.steps):
            trainer.iteration(*trainer.job.global_batch(step, trainer.size)[trainer.rank])
        actual, done = trainer.parameters(), reference.steps
        if trainer.rank == 0:
            verdict = reference.compare(actual)
            errors.append(verdict.error)
            wrong += [] if verdict.right else [verdict.complaint(done)]
    return (max(errors), wrong[0] if wrong else "") if errors else None


def check_file(trainer: Trainer, path: str) -> tuple[float, str] | None:
    """`check` with the references in a file, which is mapped: only rank 0 needs the parameters in memory."""
    return check(trainer, [Reference(*parts) for parts in torch.load(path, mmap=True)])


def save(path: str, size: int, job: Job) -> None:
    """Save the references of `size` ranks for `check_file`."""
    made = train_alone(job, size)
    torch.save([(one.before, one.after, one.steps, one.tolerance) for one in made], path)


def _share(apart: Tensor, move: Tensor, bits: Tensor, least: float) -> float:
    """The share by which a tensor's update must be off to leave its weights so far apart.

    An update that is off by a share t leaves the weights t of their move apart. It also puts a weight to the
    neighbouring number with the probability of t times the move over the weight's last bit, so in the sum of
    squares it adds t times the move times that bit. Solved for t, the few unlikely ones left out.
    """
    square = max(_norm(move), least, 1e-30) ** 2
    half = float((move.abs() * bits).sum()) / 2
    unlikely = FEW * float(bits.square().max()) if bits.numel() else 0.0
    explained = max(0.0, _norm(apart) ** 2 - unlikely) if apart.isfinite().all() else float("inf")
    return (math.sqrt(half**2 + square * explained) - half) / square


def _double(value: Tensor) -> Tensor:
    return value.detach().cpu().double()


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value))
