"""Single-process training on the whole batch, and the comparison of a baseline with it.

Peers add the ranks' gradients in orders of their own, so that sums of more than two differ in their last
bits. Deep networks with batch norm are chaotic: in three steps such a difference can grow to a third of what
a parameter moves. So the single process is trained twice then, with its ranks in two orders, and baselines
are compared before rounding has grown too large.

Even in a network that is not chaotic the last bit can put a ReLU's input on the other side of zero, which
moves a tensor's gradient by a hundredth. Not in the first step, whose forward is the same everywhere. So
baselines are compared twice: closely after the first step, and after the last one for what only later steps
can get wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import Trainer

STEPS = 3  # at most
SMALL = 1e-3  # a tensor that moves less than this share of the average one is judged by the average
# How far from the single process is right, relative to how far a tensor has moved: so far, and ten times as
# far as another order of sums leads.
TOLERANCE = 1e-3
MARGIN = 10
# Where another order of sums leads so far, a step's result tells right from wrong no more.
CHAOS = 2e-2
# How far from the single process is right where another order of sums may have led across a ReLU's kink.
KINK = 5e-2

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """How far a baseline's parameters are from the single process's, relative to how far they have moved."""

    error: float
    tensor: str
    tolerance: float = TOLERANCE

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance

    def complaint(self, steps: int) -> str:
        """What is wrong after so many steps."""
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
        """The worst tensor's error."""
        if missing := sorted(set(self.after) - set(actual)):
            return Verdict(float("inf"), missing[0], self.tolerance)
        moves = {name: _norm(self.after[name] - self.before[name]) for name in self.after}
        least = SMALL * sum(moves.values()) / len(moves)
        errors = {
            name: _norm(actual[name].cpu() - self.after[name].cpu()) / max(moves[name], least, 1e-30)
            for name in self.after
        }
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        error = errors[worst] if errors[worst] == errors[worst] else float("inf")
        return Verdict(error, worst, self.tolerance)


def train_alone(job: Job, size: int) -> list[Reference]:
    """Steps on the batches of `size` ranks in one process: what baselines are compared with, in this order.

    The batch goes through rank by rank, with the gradients averaged: for most models that is the gradient of
    the whole batch, and where it is not (batch norm) it is what data-parallel training means.
    """
    torch.set_num_threads(job.threads)
    before = _copies(job.build_model().named_parameters())
    if size <= 2:  # two numbers have one sum
        *_, after = _steps(job, size)
        return [Reference(before, after)]
    found: list[Reference] = []
    for step, (one, other) in enumerate(zip(_steps(job, size), _steps(job, size, -1), strict=True), 1):
        rounding = Reference(before, one).compare(other).error
        if found and rounding > CHAOS:
            break
        tolerance = max(KINK if found else TOLERANCE, MARGIN * rounding)
        found[1:] = [Reference(before, _copies(one.items()), step, tolerance)]  # the first step, and the last
    return found


def _steps(job: Job, size: int, order: int = 1) -> Iterator[Parameters]:
    """The parameters after each step; the next one changes them. ``order`` -1: the last rank comes first."""
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in job.global_batch(step, size)[::order]:
            (job.loss(model(inputs), targets) / size).backward()
        optimizer.step()
        yield {name: value.detach() for name, value in model.named_parameters()}


def _copies(parameters: Iterable[tuple[str, Tensor]]) -> Parameters:
    return {name: value.detach().clone() for name, value in parameters}


def check(trainer: Trainer, references: Sequence[Reference]) -> tuple[float, str] | None:
    """The same steps under a baseline, on every rank; rank 0 judges: the largest error, and what is wrong."""
    done, errors, wrong = 0, [], []
    for reference in references:
        actual = train_together(trainer, range(done, reference.steps))
        done = reference.steps
        if trainer.rank == 0:
            verdict = reference.compare(actual)
            errors.append(verdict.error)
            wrong += [] if verdict.right else [verdict.complaint(done)]
    return (max(errors), wrong[0] if wrong else "") if errors else None


def train_together(trainer: Trainer, steps: Iterable[int]) -> Parameters:
    """These steps under a baseline; every rank calls it."""
    for step in steps:
        trainer.iteration(*trainer.job.global_batch(step, trainer.size)[trainer.rank])
    return trainer.parameters()


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))
