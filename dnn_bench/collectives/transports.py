"""All carriers of collectives with one interface: in-place operations on a flat tensor.

A rank's *shard* is its part of the tensor, whose length is a multiple of the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import connected


class Collectives:
    """One rank's end. Subclasses have `reduce_scatter`, which leaves the sum over the ranks in this rank's
    shard, `all_gather`, which fills every shard with the data of its rank, and `all_reduce`.
    """

    library = "torch"

    def __init__(self, job: Job) -> None:
        self.ranks: Any = connected(self.library, job)
        self.rank, self.size = self.ranks.rank(), self.ranks.size()

    def shard(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.size, -1)[self.rank]

    def barrier(self) -> None:
        self.ranks.barrier()

    def close(self) -> None:
        self.ranks.shutdown()


class Gloo(Collectives):
    """torch.distributed's own collectives over gloo."""

    def reduce_scatter(self, tensor: Tensor) -> None:
        out = torch.empty_like(self.shard(tensor))
        dist.reduce_scatter_tensor(out, tensor)
        self.shard(tensor).copy_(out)

    def all_gather(self, tensor: Tensor) -> None:
        dist.all_gather_into_tensor(tensor, self.shard(tensor).clone())

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


class Horovod(Collectives):
    """Horovod's operations, under horovodrun."""

    library = "horovod.torch"

    def reduce_scatter(self, tensor: Tensor) -> None:
        own = self.ranks.reducescatter(tensor, op=self.ranks.Sum, name="reduce_scatter")
        self.shard(tensor).copy_(own)

    def all_gather(self, tensor: Tensor) -> None:
        tensor.copy_(self.ranks.allgather(self.shard(tensor).clone(), name="all_gather"))

    def all_reduce(self, tensor: Tensor) -> None:
        self.ranks.allreduce_(tensor, op=self.ranks.Sum, name="all_reduce")


class Ours(Collectives):
    """The transports of commsched's engine."""

    library = "commsched"

    def __init__(self, job: Job, transport: str) -> None:
        from commsched.backends.transports import make_transport

        super().__init__(job)
        _, carrier = make_transport(transport, self.ranks.global_process_set, 0, timeout=60.0)
        self.reduce_scatter, self.all_gather = carrier.reduce_scatter, carrier.all_gather
        self.all_reduce = carrier.all_reduce
