"""Check and time the collectives of one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dnn_bench.collectives.transports import Collectives

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
VOLUME = 2**22  # bytes that the repetitions of one size move at least
LEAST, MOST = 3, 40  # repetitions


class WrongResult(RuntimeError):
    """A collective left the wrong numbers; its time means nothing."""


Sample = dict[str, Any]  # one operation on a tensor of `bytes`; `seconds` and `cpu` seconds per call


def measure(collectives: Any, sizes: Sequence[int]) -> list[Sample]:
    """Check, then time, every operation at every size."""
    samples = []
    for size in sizes:
        count = max(1, round(size / 4 / collectives.size)) * collectives.size
        for operation in OPERATIONS:
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
