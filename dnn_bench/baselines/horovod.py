"""Horovod's DistributedOptimizer and, used in the same way, commsched's with any schedule."""

from __future__ import annotations

from typing import Any

from torch import nn

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import Operation, Trainer


class Horovod(Trainer):
    """As Horovod's documentation shows it."""

    library = "horovod.torch"

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        self.ranks.broadcast_parameters(model.state_dict(), root_rank=0)
        self.ranks.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, self.ranks.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


class Commsched(Trainer):
    library = "commsched"

    def __init__(self, job: Job, schedule: str) -> None:
        self.schedule = schedule
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        self.ranks.broadcast_parameters(model.state_dict(), root_rank=0)
        options = {"named_parameters": model.named_parameters(), "model": model, "schedule": self.schedule}
        return model, self.ranks.DistributedOptimizer(optimizer, **options)

    def operations(self) -> list[Operation]:
        """The engine's own record; its clock is time.monotonic(), as time.perf_counter() is on Linux."""
        return [(op.label, op.start, op.end, op.bytes) for op in self.ranks.operations(self.optimizer)]
