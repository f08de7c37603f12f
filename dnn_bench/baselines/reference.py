"""Single-process training on the whole batch, and the comparison of a baseline with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.tolerance import TOLERANCE
from dnn_bench.baselines.trainer import Trainer

STEPS = 3
SMALL = 1e-3  # a tensor that moves less than this share of the average one is judged by the average

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """How far a baseline's parameters are from the single process's, relative to how far they have moved."""

    error: float
    tensor: str

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE


def train_alone(job: Job, size: int) -> tuple[Parameters, Parameters]:
    """The parameters before and after `STEPS` steps on the batches of `size` ranks in one process.

    The batch goes through rank by rank, with the gradients averaged: for most models that is the gradient of
    the whole batch, and where it is not (batch norm) it is what data-parallel training means.
    """
    torch.set_num_threads(job.threads)
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step in range(STEPS):
        optimizer.zero_grad()
        for inputs, targets in job.global_batch(step, size):
            (job.loss(model(inputs), targets) / size).backward()
        optimizer.step()
    return before, {name: value.detach() for name, value in model.named_parameters()}


def train_together(trainer: Trainer) -> Parameters:
    """The same steps under a baseline; every rank calls it."""
    for step in range(STEPS):
        trainer.iteration(*trainer.job.global_batch(step, trainer.size)[trainer.rank])
    return trainer.parameters()


def compare(before: Parameters, expected: Parameters, actual: Parameters) -> Verdict:
    """The worst tensor's error."""
    if missing := sorted(set(expected) - set(actual)):
        return Verdict(float("inf"), missing[0])
    moves = {name: _norm(expected[name] - before[name]) for name in expected}
    least = SMALL * sum(moves.values()) / len(moves)
    errors = {
        name: _norm(actual[name].cpu() - expected[name].cpu()) / max(moves[name], least, 1e-30)
        for name in expected
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return Verdict(errors[worst] if errors[worst] == errors[worst] else float("inf"), worst)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))
