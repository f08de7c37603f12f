"""The cost of commsched itself: time of the host, and memory compared with DDP."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commsched.optimizer.deferred_updates import OptimizerView
from dnn_bench.baselines.job import Job
from dnn_bench.emulate.measure import Emulation
from scheduler.ir.link import Link

FREE = Link(0.0, 1e-15)  # a network that costs nothing: what is left is commsched's own
_ITERATIONS = 9


@dataclass(frozen=True)
class CostRow:
    """With 2 ranks over an EMULATED network that costs nothing: host seconds per bucket."""

    model: str
    buckets: int
    per_bucket: float


@dataclass(frozen=True)
class MemoryRow:
    """Peak bytes of the plain loop, of DDP with ``gradient_as_bucket_view`` (one rank), of commsched."""

    model: str
    plain: int
    ddp: int
    wrapped: int


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


def own_cost(model: str, device: str, batch: int) -> CostRow:
    emulation = Emulation(Job(model, batch, device=device), FREE, 2, warmup=3, iterations=_ITERATIONS)
    profile = emulation.profile()
    with emulation.wrapped("dear", profile) as (module, optimizer):
        emulation.time(module, optimizer, emulation.warmup)
        schedule = optimizer._driver.backend.schedule
        before = schedule.step
        with timed_host(optimizer) as clock:
            emulation.time(module, optimizer, 0)
        return CostRow(
            model, len(schedule.buckets), clock.seconds / (schedule.step - before) / len(schedule.buckets)
        )


def memory(model: str, device: str, batch: int) -> MemoryRow:
    emulation = Emulation(Job(model, batch, device=device), FREE, 2, warmup=3, iterations=1)
    profile = emulation.profile()
    plain = _peak(device, emulation.plain)
    ddp = _peak(device, lambda: _ddp(emulation))
    return MemoryRow(model, plain, ddp, _peak(device, lambda: _wrapped(emulation, profile)))


def _wrapped(emulation: Emulation, profile: Any) -> None:
    with emulation.wrapped("dear", profile) as (module, optimizer):
        emulation.time(module, optimizer, emulation.warmup)


def _ddp(emulation: Emulation) -> None:
    with _alone(emulation.job.device) as group:
        module = emulation.job.build_model()
        wrapped = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        emulation.time(wrapped, emulation.job.build_optimizer(module.parameters()), emulation.warmup)


@contextmanager
def _alone(device: str) -> Iterator[Any]:
    """A process group of this rank."""
    mine = not dist.is_initialized()
    if mine:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        if mine:
            dist.destroy_process_group()


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
