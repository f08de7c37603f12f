"""The cost of commsched itself: whole steps with one worker, time of the host, memory compared with DDP."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commsched as hvd
from commsched.optimizer.deferred_updates import OptimizerView
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.cli import Emulation
from scheduler.ir.link import Link

FREE = Link(0.0, 1e-15)  # a network that costs nothing: what is left is commsched's own
Figures = dict[str, float]


class HostTime:
    """Seconds spent in some functions, without the time of excluded calls inside; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0

    def counting(self, act: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """The same function, its time added; with ``sign=-1`` taken off where it is part of a counted one."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if (self._inside > 0) == (sign > 0):
                return act(*arguments, **options)
            self._inside += sign
            start = time.perf_counter()
            try:
                return act(*arguments, **options)
            finally:
                self.seconds += sign * (time.perf_counter() - start)
                self._inside -= sign

        return timed


@contextmanager
def timed_host(optimizer: Any) -> Iterator[HostTime]:
    """Counts what commsched does in hooks, ``step()`` and ``zero_grad()``; not the optimizer's arithmetic,
    which the plain loop has too.
    """
    clock, driver, step = HostTime(), optimizer._driver, OptimizerView.step
    for owner, name in (
        (driver.hooks, "before_forward"),
        (driver.reducer, "_end_of_backward"),
        (optimizer, "step"),
        (optimizer, "zero_grad"),
    ):
        setattr(owner, name, clock.counting(getattr(owner, name)))
    for param in driver.reducer.params:
        hooks = param._post_accumulate_grad_hooks
        hooks.update({key: clock.counting(hook) for key, hook in hooks.items()})
    optimizer._update = clock.counting(optimizer._update, sign=-1)
    OptimizerView.step = clock.counting(step, sign=-1)  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        OptimizerView.step = step  # type: ignore[method-assign]


def own_cost(job: Job, iterations: int) -> Figures:
    """Host seconds per bucket, with 2 ranks over a network that costs nothing."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=9)
    profile = emulation.profile()
    with emulation.wrapped("dear", profile) as (module, optimizer):
        emulation.time(module, optimizer, emulation.warmup)
        plan = hvd.explain(optimizer, show=False)
        assert plan is not None  # there are two ranks
        with timed_host(optimizer) as clock:
            emulation.time(module, optimizer, 0)
        buckets = len(plan.buckets)
        return {"buckets": buckets, "per_bucket": clock.seconds / emulation.iterations / buckets}


def one_worker(job: Job, iterations: int) -> Figures:
    """Seconds per iteration with one worker, plain and wrapped in turn: a slow minute affects both."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=iterations)

    def wrapped() -> float:
        module = job.build_model()
        optimizer = hvd.DistributedOptimizer(
            job.build_optimizer(module.parameters()), module.named_parameters(), model=module
        )
        return emulation.time(module, optimizer, emulation.warmup)

    hvd.init()
    found = [(emulation.plain(), wrapped()) for _ in range(3)]
    plain, ours = (median(column) for column in zip(*found, strict=True))
    return {"plain": plain, "wrapped": ours}


def memory(job: Job, iterations: int) -> Figures:
    """Peak bytes of the plain loop, of DDP with ``gradient_as_bucket_view`` (one rank), of commsched."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=1)
    profile = emulation.profile()

    def ddp() -> None:
        backend = "nccl" if job.device.startswith("cuda") else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        module = job.build_model()
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        emulation.time(wrapped, job.build_optimizer(module.parameters()), emulation.warmup)

    def commsched() -> None:
        with emulation.wrapped("dear", profile) as (module, optimizer):
            emulation.time(module, optimizer, emulation.warmup)

    acts = {"plain": emulation.plain, "ddp": ddp, "wrapped": commsched}
    return {name: _peak(job.device, act) for name, act in acts.items()}


def _peak(device: str, act: Callable[[], object]) -> int:
    """Most bytes at once, of all tensors; 0 on a CPU, whose allocator does not tell."""
    if not device.startswith("cuda"):
        act()
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    act()
    return int(torch.cuda.max_memory_allocated())


MEASURES: dict[str, Callable[[Job, int], Figures]] = {"steps": one_worker, "cost": own_cost, "memory": memory}
