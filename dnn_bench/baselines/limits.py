"""Lower limits of a step: the compute alone, the bytes alone, and both at once without dependency."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dnn_bench.baselines.trainer import Job, Stamps, Trainer


class Local(Trainer):
    """Every rank trains alone; all at the same time, since they share the machine's memory."""


class Exchange:
    """Moves as many bytes as an all-reduce of `size` bytes does: a reduce-scatter, then an all-gather.

    Every rank sends a share to each other rank, twice. With several ranks on each of several hosts, what
    leaves a host is what one rank a host would send: its ranks share it out, and each sends to those of its
    place on the other hosts. Memory inside a host counts as free.

    Receives are posted first: gloo announces a receive on the connection that carries the other direction's
    data, so megabytes of data would delay it.
    """

    def __init__(self, size: int) -> None:
        me, ranks = dist.get_rank(), dist.get_world_size()
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        apart = (
            per_host if per_host < ranks else 1
        )  # between the ranks that exchange; hosts are in rank order
        share = -(-size // ranks)
        self.sends, self.receives = [], []
        for half in range(2):
            for distance in range(apart, ranks, apart):
                to, source, tag = (me + distance) % ranks, (me - distance) % ranks, half * ranks + distance
                self.sends.append((torch.zeros(share, dtype=torch.uint8), to, tag))
                self.receives.append((torch.empty(share, dtype=torch.uint8), source, tag))

    def __call__(self) -> None:
        works = [dist.irecv(buffer, source, tag=tag) for buffer, source, tag in self.receives]
        works += [dist.isend(buffer, to, tag=tag) for buffer, to, tag in self.sends]
        for work in works:
            assert work is not None
            work.wait()


def gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class Floor(Trainer):
    """The iteration ends when the compute and the exchange have both ended; neither waits for the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.exchange = Exchange(gradient_bytes(self.module))
        self.pool = ThreadPoolExecutor(1)

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        exchanged = self.pool.submit(self.exchange)
        stamps = super().iteration(inputs, targets)
        exchanged.result()
        return stamps._replace(end=time.perf_counter())

    def close(self) -> None:
        self.pool.shutdown()
        super().close()


class Wire(Trainer):
    """The exchange alone, without compute."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.exchange = Exchange(gradient_bytes(self.module))

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        start = time.perf_counter()
        self.exchange()
        return Stamps(start, start, start, time.perf_counter())

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        return None, None
