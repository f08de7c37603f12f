"""All carriers of collectives with one interface: in-place operations on a flat tensor.

A rank's *shard* is its part of the tensor, whose length is a multiple of the number of ranks.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dnn_bench.baselines.job import Job


class Collectives:
    """One rank's end. A subclass connects to the others in `__init__`, which sets `rank` and `size`."""

    rank: int
    size: int

    def shard(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.size, -1)[self.rank]

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Leave the sum over the ranks in this rank's shard."""
        raise NotImplementedError

    def all_gather(self, tensor: Tensor) -> None:
        """Fill every shard with the data of its rank."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the sum over the ranks in the whole tensor."""
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Gloo(Collectives):
    """torch.distributed's own collectives over gloo."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        dist.init_process_group(
            "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def reduce_scatter(self, tensor: Tensor) -> None:
        out = torch.empty_like(self.shard(tensor))
        dist.reduce_scatter_tensor(out, tensor)
        self.shard(tensor).copy_(out)

    def all_gather(self, tensor: Tensor) -> None:
        dist.all_gather_into_tensor(tensor, self.shard(tensor).clone())

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class Horovod(Collectives):
    """Horovod's operations, under horovodrun."""

    def __init__(self, job: Job) -> None:
        import horovod.torch as hvd

        torch.set_num_threads(job.threads)
        hvd.init()
        self.hvd: Any = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def reduce_scatter(self, tensor: Tensor) -> None:
        self.shard(tensor).copy_(self.hvd.reducescatter(tensor, op=self.hvd.Sum, name="reduce_scatter"))

    def all_gather(self, tensor: Tensor) -> None:
        tensor.copy_(self.hvd.allgather(self.shard(tensor).clone(), name="all_gather"))

    def all_reduce(self, tensor: Tensor) -> None:
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="all_reduce")

    def barrier(self) -> None:
        self.hvd.barrier()

    def close(self) -> None:
        self.hvd.shutdown()


class Ours(Collectives):
    """The transports of commsched's engine."""

    def __init__(self, job: Job, transport: str) -> None:
        import commsched as hvd
        from commsched.backends.transports import make_transport

        torch.set_num_threads(job.threads)
        hvd.init()
        self.hvd: Any = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        _, self.transport = make_transport(transport, hvd.global_process_set, 0, timeout=60.0)

    def reduce_scatter(self, tensor: Tensor) -> None:
        self.transport.reduce_scatter(tensor)

    def all_gather(self, tensor: Tensor) -> None:
        self.transport.all_gather(tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        self.transport.all_reduce(tensor)

    def barrier(self) -> None:
        self.hvd.barrier()

    def close(self) -> None:
        self.hvd.shutdown()
