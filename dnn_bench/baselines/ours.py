"""commsched.DistributedOptimizer with any schedule, used as Horovod's is."""

from __future__ import annotations

from typing import Any

from torch import nn

import commsched as hvd
from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import Trainer


class Commsched(Trainer):
    def __init__(self, job: Job, schedule: str, **options: Any) -> None:
        self.options = {"schedule": schedule, **options}
        super().__init__(job)

    def connect(self) -> tuple[int, int]:
        hvd.init()
        return hvd.rank(), hvd.size()

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), model=model, **self.options
        )
        return model, wrapped

    def barrier(self) -> None:
        hvd.barrier()

    def operations(self) -> list[tuple[str, float, float, int]]:
        """The engine's own record; its clock is time.monotonic(), as time.perf_counter() is on Linux."""
        return [(op.label, op.start, op.end, op.bytes) for op in hvd.operations(self.optimizer)]

    def close(self) -> None:
        hvd.shutdown()
