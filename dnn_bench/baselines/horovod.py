"""Horovod's DistributedOptimizer, as its documentation shows it."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from torch import nn

from dnn_bench.baselines.trainer import Trainer


class Horovod(Trainer):
    def connect(self) -> tuple[int, int]:
        hvd.init()
        return hvd.rank(), hvd.size()

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def barrier(self) -> None:
        hvd.barrier()

    def close(self) -> None:
        hvd.shutdown()
