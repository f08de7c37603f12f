"""torch.distributed.pipelining on the same model, cuts, batches and micro-batches."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils._pytree import tree_flatten, tree_unflatten

from commsched.pipeline import Job, split

SCHEDULES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
_SEVERAL = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
"""Those that take a list of stages."""


class Peer:
    """One rank of torch's pipeline. ``cuts``: as many stages as ranks, or a multiple of that;
    ``example``: inputs of a micro-batch.
    """

    def __init__(
        self,
        job: Job,
        schedule: str,
        cuts: tuple[int, ...],
        microbatches: int,
        example: Tensor,
        rank: int,
        size: int,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"torch.distributed.pipelining has no {schedule}; it has {', '.join(SCHEDULES)}")
        modules = split(copy.deepcopy(job.model), cuts=cuts)
        mine, device = range(rank, len(cuts), size), torch.device("cpu")
        flat = _flat(modules, example)
        stages = [pipelining.PipelineStage(flat[i], i, len(cuts), device) for i in mine]
        self.first, self.last = rank == 0, rank == size - 1
        name = SCHEDULES[schedule]
        kind: Callable[..., Any] = getattr(pipelining, name)
        given: Any = stages if name in _SEVERAL else stages[0]
        self.schedule = kind(given, n_microbatches=microbatches, loss_fn=job.loss)
        weights = {id(p): p for i in mine for p in modules[i].parameters() if p.requires_grad}
        self.shared = _shared(modules, rank, size)
        self.optimizer = job.optimizer(list(weights.values()))

    def step(self, batch: tuple[Any, Any]) -> float | None:
        """One optimizer step; the mean loss on the last rank."""
        inputs, targets = batch
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        arguments = (inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=targets, losses=losses)
        else:
            self.schedule.step(*arguments)
        for weight, among in self.shared:
            dist.all_reduce(weight.grad, group=among)
        self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if self.last else None


class _Flat(nn.Module):
    """A stage as torch wants it, which sends nothing but tensors: it returns a tuple of those that the next
    stage reads, and takes those that ``before`` has.
    """

    def __init__(self, stage: nn.Module, before: Any, last: bool) -> None:
        super().__init__()
        self.stage, self.last = stage, last
        self.leaves, self.shape = tree_flatten(before)

    def forward(self, *arguments: Tensor) -> Any:
        if self.leaves:
            arrived = iter(arguments)
            arguments = tree_unflatten([next(arrived) if _travels(x) else x for x in self.leaves], self.shape)
        output = self.stage(*arguments)
        return output if self.last else tuple(filter(_travels, tree_flatten(output)[0]))


def _travels(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > 0


def _flat(modules: list[Any], example: Tensor) -> list[_Flat]:
    """The stages, each with what an example of the one before returned."""
    flat, before = [], ()
    for stage in modules:
        flat.append(_Flat(stage, before, stage is modules[-1]))
        with torch.no_grad():
            before = stage(*(before or (example,)))
    return flat


def _shared(modules: list[Any], rank: int, size: int) -> list[tuple[Any, Any]]:
    """This rank's parameters that stages of other ranks use too, which torch leaves to its users, and among
    whom each is to be summed. Every rank calls.
    """
    holders: dict[int, set[int]] = {}
    weights: dict[int, Any] = {}
    for number, module in enumerate(modules):
        for weight in module.parameters():
            holders.setdefault(id(weight), set()).add(number % size)
            weights[id(weight)] = weight
    several = [(key, sorted(ranks)) for key, ranks in holders.items() if len(ranks) > 1]
    groups = [(weights[key], ranks, dist.new_group(ranks)) for key, ranks in several]
    return [(weight, group) for weight, ranks, group in groups if rank in ranks]


def timed(peer: Peer, batches: Any, warmup: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of a step, and the losses (on the last rank)."""
    losses = []
    start = 0.0
    for number in range(warmup + steps):
        if number == warmup:
            dist.barrier()
            start = time.perf_counter()
        losses.append(peer.step(next(batches)))
    dist.barrier()
    return (time.perf_counter() - start) / steps, [value for value in losses if value is not None]
