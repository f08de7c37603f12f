"""All carriers of collectives with one interface, checked and timed: in-place operations on a flat tensor.

A rank's *shard* is its part of the tensor, whose length is a multiple of the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dnn_bench.baselines.trainer import Job, connected

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "all_reduce_50", "broadcast")
PARTS = 50  # of a tensor, in as many asynchronous operations
VOLUME = 2**22  # bytes that the repetitions of one size move at least
LEAST, MOST = 3, 40  # repetitions


class Collectives:
    """One rank's end. Subclasses have `reduce_scatter`, which leaves the sum over the ranks in this rank's
    shard, `all_gather`, which fills every shard with the data of its rank, and `all_reduce`. Some have
    `all_reduce_50`, the same in fifty asynchronous operations, and `broadcast` from the last rank.
    """

    library = "torch"

    def __init__(self, job: Job) -> None:
        self.ranks: Any = connected(self.library, job)
        self.rank, self.size = self.ranks.rank(), self.ranks.size()
        self.barrier, self.close = self.ranks.barrier, self.ranks.shutdown

    def shard(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.size, -1)[self.rank]


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return fifty parts; each that would be empty is a number outside of the tensor."""
    return [part if len(part) else tensor.new_zeros(1) for part in tensor.tensor_split(PARTS)]


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

    def all_reduce_50(self, tensor: Tensor) -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in parts_of(tensor)]:
            work.wait()

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self.size - 1)


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

    def all_reduce_50(self, tensor: Tensor) -> None:
        ranks = self.ranks
        parts = enumerate(parts_of(tensor))
        for handle in [ranks.allreduce_async_(part, op=ranks.Sum, name=f"part {i}") for i, part in parts]:
            ranks.synchronize(handle)

    def broadcast(self, tensor: Tensor) -> None:
        self.ranks.broadcast_(tensor, self.size - 1, name="broadcast")


class Operations(Horovod):
    """commsched's operations of the same names, over its channel of messages."""

    library = "commsched"


class Ours(Collectives):
    """The transports of commsched's engine."""

    library = "commsched"

    def __init__(self, job: Job, transport: str) -> None:
        from commsched.backends.cpu import make_transport

        super().__init__(job)
        _, carrier = make_transport(transport, self.ranks.global_process_set, 0, timeout=60.0)
        self.reduce_scatter, self.all_gather = carrier.reduce_scatter, carrier.all_gather
        self.all_reduce = carrier.all_reduce


class WrongResult(RuntimeError):
    """A collective left the wrong numbers; its time means nothing."""


Sample = dict[str, Any]  # one operation on a tensor of `bytes`; `seconds` and `cpu` seconds per call


def measure(collectives: Any, sizes: Sequence[int]) -> list[Sample]:
    """Check, then time, every operation at every size."""
    samples = []
    for size in sizes:
        count = max(1, round(size / 4 / collectives.size)) * collectives.size
        for operation in (name for name in OPERATIONS if hasattr(collectives, name)):
            check(collectives, operation, count)
            samples.append(time_one(collectives, operation, count))
    return samples


def pattern(rank: int, count: int) -> Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return (torch.arange(count) % 7 + rank + 1).float()


def check(collectives: Collectives, operation: str, count: int) -> None:
    """Raise `WrongResult` unless the operation leaves the expected numbers."""
    size = collectives.size
    tensor = pattern(collectives.rank, count)
    getattr(collectives, operation)(tensor)
    parts = [pattern(rank, count) for rank in range(size)]
    total = torch.stack(parts).sum(dim=0)
    actual, expected = {
        "reduce_scatter": (collectives.shard(tensor), collectives.shard(total)),
        "all_gather": (tensor, torch.cat([part.view(size, -1)[rank] for rank, part in enumerate(parts)])),
        "all_reduce": (tensor, total),
        "all_reduce_50": (tensor, total),
        "broadcast": (tensor, parts[-1]),
    }[operation]
    if not torch.equal(actual, expected):
        first = int((actual != expected).nonzero()[0])
        raise WrongResult(
            f"{operation} of {count} numbers on {size} ranks: element {first} is {actual[first].item()} and "
            f"should be {expected[first].item()}"
        )


def time_one(collectives: Collectives, operation: str, count: int) -> Sample:
    """Mean time of calls without a pause, after as many untimed ones: a link that rested exceeds its rate."""
    tensor = torch.zeros(count)  # sums of sums stay finite
    call = getattr(collectives, operation)
    repeats = min(MOST, max(LEAST, VOLUME // (4 * count)))
    for _ in range(repeats):
        call(tensor)
    collectives.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call(tensor)
    seconds, cpu = (time.perf_counter() - start) / repeats, (time.process_time() - cpu) / repeats
    return {"operation": operation, "bytes": 4 * count, "seconds": seconds, "cpu": cpu}
