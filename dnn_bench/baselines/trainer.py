"""`Trainer`: one rank's training loop, the same for every baseline but for what is overridden."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dnn_bench.baselines.job import Job


class Stamps(NamedTuple):
    """Clock readings (`time.perf_counter`) around the phases of one iteration."""

    start: float
    forward: float
    backward: float
    end: float


class Trainer:
    """Builds the job's model in this rank and steps it.

    A baseline overrides `connect` (how ranks find each other) and `wrap` (what it makes of the model).
    """

    model: Any
    optimizer: Any
    loss: Tensor  # of the last iteration, on this rank's batch

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.set_num_threads(job.threads)
        self.rank, self.size = self.connect()
        self.module = job.build_model()
        self.model, self.optimizer = self.wrap(self.module)

    def connect(self) -> tuple[int, int]:
        """Joins the other ranks; returns this one's number and how many there are."""
        backend = "nccl" if self.job.device.startswith("cuda") else "gloo"
        dist.init_process_group(
            backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        return dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        """The model to call and the optimizer to step."""
        return model, self.job.build_optimizer(model.parameters())

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model(inputs), targets)
        self.loss = loss.detach()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return Stamps(start, forward, backward, time.perf_counter())

    def finish(self) -> None:
        """Wait for all operations in flight."""
        if self.job.device.startswith("cuda"):
            torch.cuda.synchronize()

    def barrier(self) -> None:
        dist.barrier()

    def record_operations(self) -> None:
        """Start to record. Called once, after all timing: recording takes time."""

    def operations(self) -> list[tuple[str, float, float, int]]:
        """Communication since the last call, where the baseline tells: (label, start, end, bytes sent).

        Times are on the clock of `Stamps`.
        """
        return []

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters by the names of the plain model; every rank calls it."""
        self.finish()
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
