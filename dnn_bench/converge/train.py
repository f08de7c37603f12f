"""One rank's training run."""

from __future__ import annotations

from typing import Any

import torch

from dnn_bench.baselines.trainer import Trainer
from dnn_bench.converge.tasks import TaskJob


def train(trainer: Trainer, steps: int, path: str) -> dict[str, Any]:
    """Trains; the losses of this rank's shards, and from rank 0 the accuracy. Parameters go to `path`."""
    job = trainer.job
    assert isinstance(job, TaskJob)
    losses = []
    for step in range(steps):
        trainer.iteration(*job.global_batch(step, trainer.size)[trainer.rank])
        losses.append(float(trainer.loss))
    parameters = trainer.parameters()
    accuracy = job.accuracy(trainer.model)
    if trainer.rank == 0:
        torch.save(parameters, path)
    trainer.barrier()
    return {"losses": losses, "accuracy": accuracy}
