"""`Trainer`: one rank's training loop, the same for every baseline but for what is overridden."""

from __future__ import annotations

import importlib
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


Operation = tuple[str, float, float, int]  # label, start, end (on the clock of `Stamps`), bytes sent


class TorchRanks:
    """torch.distributed's group of all ranks, with the functions that Horovod's module has."""

    def __init__(self, device: str) -> None:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, rank=rank, world_size=size)
        self.rank, self.size = dist.get_rank, dist.get_world_size
        self.barrier, self.shutdown = dist.barrier, dist.destroy_process_group


def connected(library: str, job: Job) -> Any:
    """Join the other ranks. Returns the library's module, or what looks like it for torch."""
    torch.set_num_threads(job.threads)
    if library == "torch":
        return TorchRanks(job.device)
    module = importlib.import_module(library)
    module.init()
    return module


class Trainer:
    """Builds the job's model in this rank and steps it.

    A baseline overrides `library` (how ranks find each other) and `wrap` (what it makes of the model).
    """

    library = "torch"
    model: Any
    optimizer: Any
    loss: Tensor  # of the last iteration, on this rank's batch

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = connected(self.library, job)
        self.rank, self.size = self.ranks.rank(), self.ranks.size()
        self.module = job.build_model()
        self.model, self.optimizer = self.wrap(self.module)

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
        self.ranks.barrier()

    def record_operations(self) -> None:
        """Start to record. Called once, after all timing: recording takes time."""

    def operations(self) -> list[Operation]:
        """Communication since the last call, of baselines that record it."""
        return []

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters by the names of the plain model; every rank calls it."""
        self.finish()
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def close(self) -> None:
        self.ranks.shutdown()
