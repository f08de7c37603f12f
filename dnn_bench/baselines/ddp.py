"""PyTorch's DistributedDataParallel, and ZeroRedundancyOptimizer over it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import Operation, Trainer


class DDP(Trainer):
    def __init__(self, job: Job, bucket_cap_mb: float | None = None) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.recorded: list[Operation] = []
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        buckets: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
        return wrapped, self.job.build_optimizer(wrapped.parameters())

    def record_operations(self) -> None:
        # DDP looks at a hook's annotations, which it does not understand as strings; a lambda has none.
        self.model.register_comm_hook(None, lambda state, bucket: self._recorded_all_reduce(bucket))

    def _recorded_all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce as DDP does by itself, and record its start and end."""
        buffer, begin, number = bucket.buffer(), time.perf_counter(), bucket.index()
        buffer.div_(self.size)

        def note(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            sent = 2 * (self.size - 1) * buffer.nbytes // self.size
            self.recorded.append((f"AR{number}", begin, time.perf_counter(), sent))
            return reduced.value()[0]

        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(note)

    def operations(self) -> list[Operation]:
        recorded, self.recorded = self.recorded, []
        return recorded


class Zero1(DDP):
    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        wrapped, _ = super().wrap(model)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            optimizer_class=torch.optim.SGD,
            parameters_as_bucket_view=True,
            lr=self.job.learning_rate,
            momentum=self.job.momentum,
        )
        return wrapped, optimizer
