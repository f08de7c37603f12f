"""Whole training steps with one worker, plain and wrapped."""

from __future__ import annotations

from dataclasses import dataclass

import commsched as hvd
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.measure import Emulation
from dnn_bench.gpu.cost import FREE


@dataclass(frozen=True)
class StepRow:
    """Seconds per iteration, plain and through ``commsched.DistributedOptimizer`` with one worker."""

    model: str
    plain: float
    wrapped: float


def one_worker(model: str, device: str, iterations: int, batch: int) -> StepRow:
    """Time both in turn, so that a slow minute affects both."""
    emulation = Emulation(Job(model, batch, device=device), FREE, 2, warmup=3, iterations=iterations)

    def wrapped() -> float:
        module = emulation.job.build_model()
        optimizer = hvd.DistributedOptimizer(
            emulation.job.build_optimizer(module.parameters()), module.named_parameters(), model=module
        )
        return emulation.time(module, optimizer, emulation.warmup)

    hvd.init()
    found = [(emulation.plain(), wrapped()) for _ in range(3)]
    return StepRow(model, *(sorted(column)[1] for column in zip(*found, strict=True)))
