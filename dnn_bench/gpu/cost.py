"""Bandwidth of packing gradients; cost of commsched itself: steps with one worker, host time, memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commsched as hvd
from comm_core.cuda import BucketCopy, one_after_another
from commsched.optimizer.whole_step import OptimizerView
from dnn_bench import models
from dnn_bench.baselines.trainer import Job
from dnn_bench.emulate.cli import Emulation
from scheduler.ir.link import Link

WARM_UP = 3
PAIRS = 7
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
    clock, session, step = HostTime(), optimizer._session, OptimizerView.step
    for owner, name in (
        (session.hooks, "before_forward"),
        (session.round, "end_of_backward"),
        (optimizer, "step"),
        (optimizer, "zero_grad"),
    ):
        setattr(owner, name, clock.counting(getattr(owner, name)))
    for param in session.round.params:
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
    """Seconds per iteration with one worker, and the median ratio: a slow moment affects one pair."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=iterations)

    def wrapped() -> float:
        module = job.build_model()
        optimizer = hvd.DistributedOptimizer(
            job.build_optimizer(module.parameters()), module.named_parameters(), model=module
        )
        return emulation.time(module, optimizer, emulation.warmup)

    hvd.init()
    found: list[tuple[float, float]] = []
    for turn in range(PAIRS):
        if turn % 2:
            ours, plain = wrapped(), emulation.plain()
        else:
            plain, ours = emulation.plain(), wrapped()
        found.append((plain, ours))
    plain, ours = (statistics.median(column) for column in zip(*found, strict=True))
    return {"plain": plain, "wrapped": ours, "ratio": statistics.median(b / a for a, b in found)}


def memory(job: Job, iterations: int) -> Figures:
    """Peak bytes of the plain loop, of DDP with ``gradient_as_bucket_view`` (one rank), of commsched."""
    emulation = Emulation(job, FREE, 2, warmup=3, iterations=1)
    profile = emulation.profile()

    def ddp() -> None:
        backend = "nccl" if job.device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        module = job.build_model()
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        emulation.time(wrapped, job.build_optimizer(module.parameters()), emulation.warmup)
        dist.destroy_process_group()  # which keeps the buckets

    def commsched() -> None:
        with emulation.wrapped("dear", profile) as (module, optimizer):
            emulation.time(module, optimizer, emulation.warmup)

    acts = {"plain": emulation.plain, "wrapped": commsched, "ddp": ddp}
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


def tensors_of(model: str, device: torch.device) -> list[torch.Tensor]:
    """Random gradients in the sizes of a model's parameters."""
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build(model).parameters()]
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(size, generator=generator, device=device) for size in sizes]


def packing_rows(model: str, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Measure every way to pack. The result of each kernel is checked before it is timed.

    ``bytes`` are read and written by one call; ``to_copy`` is its bandwidth over a plain copy's.
    """
    tensors = tensors_of(model, device)
    total = sum(t.numel() for t in tensors)
    flat, other = (torch.zeros(total, device=device) for _ in range(2))
    half = torch.empty_like(flat, dtype=torch.bfloat16)
    sizes = [t.numel() for t in tensors]
    views, halves = flat.split(sizes), half.split(sizes)
    ways: list[tuple[str, Callable[[], object], int]] = [
        ("copy of the whole", lambda: other.copy_(flat), 8),
        ("pack to float32", _packing(tensors, flat), 8),
        ("pack to bfloat16", _packing(tensors, half), 6),
        ("torch._foreach_copy_", lambda: torch._foreach_copy_(views, tensors), 8),
        ("torch._foreach_copy_ to bfloat16", lambda: torch._foreach_copy_(halves, tensors), 6),
        ("torch.cat", lambda: torch.cat(tensors, out=flat), 8),
    ]
    found: list[dict[str, Any]] = []
    for what, act, moved in ways:
        seconds, size = seconds_of(act, device, repeats), moved * total
        copy = found[0] if found else {"bytes": size, "seconds": seconds}
        to_copy = (size / seconds) / (copy["bytes"] / copy["seconds"])
        row = {"model": model, "what": what, "seconds": seconds, "bytes": size, "to_copy": to_copy}
        found.append(row)
    return found


def _packing(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> Callable[[], object]:
    """A call that packs, after one whose result was right."""
    copy = BucketCopy(one_after_another([t.numel() for t in tensors]), bucket, len(tensors), torch.float32)
    copy.pack(tensors, 0.5)
    wanted = (torch.cat(list(tensors)) * 0.5).to(bucket.dtype)
    if not torch.equal(bucket, wanted):
        worst = (bucket.float() - wanted.float()).abs().max().item()
        raise ValueError(f"packing to {bucket.dtype} is wrong by up to {worst}; nothing was timed")
    return lambda: copy.pack(tensors, 0.5)


def seconds_of(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the repetitions, after some that do not count."""
    for _ in range(WARM_UP):
        act()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False))
