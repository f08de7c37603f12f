"""One rank of a measurement: profile, train, compare.

python -m dnn_bench.pipeline.worker FOLDER OPTIONS (JSON), started as a rank of a job; rank 0 leaves its
report in FOLDER/rank.0.json
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils._pytree import tree_flatten, tree_unflatten

import commsched
from commsched.pipeline import Job, Pipeline, profile, split
from commsched.pipeline.interpreter import Span, handling
from commsched.pipeline.profiling import message_link, traffic_cost
from commsched.pipeline.rows import border, cut
from dnn_bench.pipeline.jobs import job_of
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Layout
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Profile
from scheduler.pipelines.report import examine

Taken = dict[str, list[float]]
"""Of every round: seconds of a step of `ours`, of torch's (`theirs`) and of the other placement (`others`);
the share of a step in which ranks do not compute (`bubbles`) and in which the slowest does (`reached`). All
losses of ours (`losses`) and of torch's (`expected`).
"""


def measure(options: Namespace) -> str:
    """Measure; every rank calls, rank 0 gets the report."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    commsched.init()
    paced = {"seconds": options.seconds, "height": max(1, options.layer_bytes // 256)}
    job = job_of(options.model, options.layers, **(paced if options.model == "paced" else {}))
    pipeline = _pipeline(options, job, options.placement)
    rows = options.batch_size or default_rows(pipeline.layout)
    other = _pipeline(options, job, options.against) if options.against else None
    micro = cut(next(job.batches(rows)), (0, border(1, rows, options.microbatches)))
    costs, cluster = _costs(pipeline, job, micro)
    handled = _handling(options, job, rows)
    report = examine(pipeline.program, costs, cluster, handled)
    peer = _peer(options, pipeline, job, rows) if options.peer else None
    taken = _rounds(options, job, rows, pipeline, other, peer)
    result = PipelineResult(
        model=options.model,
        schedule=options.schedule,
        delays=pipeline.delays,
        period=statistics.median(taken["ours"]),
        simulated=report.period,
        bubble=statistics.median(taken["bubbles"]),
        simulated_bubble=report.bubble_fraction,
        reached=statistics.median(taken["reached"]),
        rows=rows,
        losses=taken["losses"],
        handling=max(handled),
    )
    if peer is not None:
        _compare(result, taken)
    if other is not None:
        result.gain = Ratio.of(taken["others"], taken["ours"])
        result.simulated_gain = examine(other.program, costs, cluster, handled).period / report.period
        other.close()
    pipeline.close()
    rank = commsched.rank()
    commsched.shutdown()
    said = json.dumps(asdict(result)) if options.json else result.described()
    return said if rank == 0 else ""


def default_rows(layout: Layout) -> int:
    """Four rows per micro-batch, or one for each replica where there are more."""
    return layout.microbatches * max(4, *(len(ranks) for ranks in layout.ranks))


def _rounds(
    options: Namespace, job: Job, rows: int, pipeline: Pipeline, other: Pipeline | None, peer: Peer | None
) -> Taken:
    """Time this pipeline, the one with the other placement and torch's, in turn."""
    taken: Taken = defaultdict(list)

    def take_ours() -> None:
        seconds, busy, losses = _timed(pipeline, job.batches(rows), options)
        taken["ours"].append(seconds)
        taken["bubbles"].append(1 - statistics.mean(busy) / seconds)
        taken["reached"].append(max(busy) / seconds)
        taken["losses"] += losses

    def take_other() -> None:
        if other is not None:
            taken["others"].append(_timed(other, job.batches(rows), options)[0])

    def take_peer() -> None:
        if peer is not None:
            seconds, losses = timed(peer, job.batches(rows), options.warmup, options.steps)
            taken["theirs"].append(seconds)
            taken["expected"] += losses

    turns = [take_ours, take_other, take_peer]
    for number in range(options.rounds):
        # Alternate the order, so that no place in the round is an advantage.
        for take in turns if number % 2 == 0 else reversed(turns):
            take()
    return taken


def _pipeline(options: Namespace, job: Job, placement: str) -> Pipeline:
    common: dict[str, Any] = {"loss": job.loss, "optimizer": job.optimizer}
    model = copy.deepcopy(job.model)
    if options.plan:
        return Pipeline(model, plan=replace(PipelinePlan.load(options.plan), placement=placement), **common)
    if options.ranks:
        common["ranks"] = options.ranks
    else:
        common["mesh"] = (options.depth, options.replicas)
    if options.hop > 1:
        common["hop"] = options.hop
    return Pipeline(
        model,
        options.schedule,
        options.microbatches,
        cuts=options.cuts,
        placement=placement,
        recompute=options.recompute,
        hosts=options.host_ranks,
        **common,
    )


def _costs(pipeline: Pipeline, job: Job, batch: tuple[Any, Any]) -> tuple[Profile, Cluster]:
    """Layer times that all ranks measure at the same time, and messages timed between two of them."""
    commsched.allreduce(torch.zeros(1), name="before the profile")
    mine = profile(job.model, job.loss, batch, optimizer=job.optimizer, repeat=5)
    size = pipeline.fabric.size
    replicated = size > pipeline.layout.positions
    # Sums are always long messages, however short what passes between stages.
    borders = [mine.layers[cut - 1].activation_bytes for cut in pipeline.layout.cuts[1:]]
    crossing = None if replicated else max(borders, default=0)
    wire = Link(1e-6, 1e-12) if size == 1 else message_link(pipeline.fabric, crossing)
    if replicated:
        mine = replace(mine, traffic_per_byte=traffic_cost(pipeline.fabric, wire))
    return commsched.broadcast_object(mine), Cluster.flat(size, wire)


def _handling(options: Namespace, job: Job, rows: int) -> list[float]:
    """Seconds that each rank needs between two actions where it waits for nothing."""
    # With another pipeline: losses are compared from the first step.
    pipeline = _pipeline(options, job, options.placement)
    spans = _run(pipeline, job.batches(rows), options.warmup, steps=2)[1]
    pipeline.drain()
    pipeline.close()
    return commsched.allgather_object(handling(spans))


def _timed(pipeline: Pipeline, batches: Any, options: Namespace) -> tuple[float, list[float], list[float]]:
    """Seconds of a step at rest, those of them in which each rank computes, losses."""
    seconds, spans, losses = _run(pipeline, batches, options.warmup, options.steps)
    busy = sum(span.end - span.start for span in spans) / options.steps
    losses += pipeline.drain()
    everyone = commsched.allgather_object((seconds / options.steps, busy))
    period = max(value for value, _ in everyone)
    return period, [value for _, value in everyone], [value for value in losses if value is not None]


def _run(pipeline: Pipeline, batches: Any, warmup: int, steps: int) -> tuple[float, list[Span], list[Any]]:
    """Seconds of all these steps after the warm-up, when this rank computed in them, and all losses."""
    losses: list[float | None] = []
    interpreter = pipeline._interpreter
    # An asynchronous pipeline is at rest once it is full.
    fill = warmup + pipeline._ahead
    start = 0.0
    for number in range(fill + steps):
        if number == fill:
            interpreter.spans = []
            start = time.perf_counter()
        losses.append(pipeline.step(next(batches)))
    seconds = time.perf_counter() - start
    spans, interpreter.spans = interpreter.spans or [], None
    return seconds, spans, losses


def _peer(options: Namespace, pipeline: Pipeline, job: Job, rows: int) -> Peer:
    if pipeline.fabric.size != pipeline.layout.positions:
        raise ValueError("torch.distributed.pipelining is compared without replicas: --num-data-parallel 1")
    rank, size = commsched.rank(), commsched.size()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    example, _ = next(job.batches(rows // options.microbatches))
    return Peer(job, options.schedule, pipeline.layout.cuts, options.microbatches, example, rank, size)


def _compare(result: PipelineResult, taken: Taken) -> None:
    """Add torch's figures; the last rank has its losses."""
    result.peer = statistics.median(taken["theirs"])
    result.ratio = Ratio.of(taken["theirs"], taken["ours"])
    (expected,) = filter(None, commsched.allgather_object(taken["expected"]))
    differences = (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(result.losses, expected))
    result.difference = max(differences)


def main() -> None:
    """Leave the result, or an error of the user's, in a file of this rank: outputs of ranks may mix."""
    folder, options = sys.argv[1:]
    answer = {}
    try:
        if said := measure(Namespace(**json.loads(options))):
            answer = {"said": said}
    except ValueError as error:
        answer = {"error": str(error)}
        raise
    finally:
        if answer:
            (Path(folder) / f"rank.{os.environ['RANK']}.json").write_text(json.dumps(answer))


# -- torch.distributed.pipelining on the same model, cuts, batches and micro-batches -------------------------

SCHEDULES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}


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
        given: Any = stages if "Interleaved" in name else stages[0]  # these take several stages
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


# -- the result of a pipeline's measurement ------------------------------------------------------------------


class Ratio(NamedTuple):
    """The median of ratios, and between which bounds the true one lies with 95 % confidence, whatever the
    scatter looks like (with fewer than six ratios these are the smallest and the largest, which says less).
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, others: Sequence[float], ours: Sequence[float]) -> Ratio:
        """Of times taken in turn: within a round, since machines change their speed from one to the next."""
        ratios = sorted(other / mine for other, mine in zip(others, ours, strict=True))
        # How many of n lie below the true median is binomial: about n / 2, with a deviation of sqrt(n) / 2.
        outside = max(0, math.floor((len(ratios) - 1 - 1.96 * math.sqrt(len(ratios))) / 2))
        return cls(statistics.median(ratios), ratios[outside], ratios[-1 - outside])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass
class PipelineResult:
    """Seconds of a step and bubbles, measured and simulated. ``reached``: throughput over that of a pipeline
    without bubbles, whose slowest rank always computes. ``ratio``: throughput over the peer's. ``gain``: over
    that of the other placement, measured and simulated. ``handling``: what the slowest rank needs between two
    actions.
    """

    model: str
    schedule: str
    delays: tuple[int, ...]
    period: float
    simulated: float
    bubble: float
    simulated_bubble: float
    reached: float
    rows: int
    losses: list[float]
    peer: float | None = None
    ratio: Ratio | None = None
    gain: Ratio | None = None
    simulated_gain: float | None = None
    difference: float | None = None
    handling: float = 0.0

    def described(self) -> str:
        lines = [
            f"{self.schedule} of {self.model}: {self.period * 1e3:.2f} ms per step,"
            f" {self.rows / self.period:.1f} rows per second; delays {' '.join(map(str, self.delays))}",
            f"  simulated {self.simulated * 1e3:.2f} ms ({self.simulated / self.period - 1:+.1%})",
            f"  bubble {self.bubble:.1%}, simulated {self.simulated_bubble:.1%};"
            f" {self.reached:.3f} of the rate without any; {self.handling * 1e3:.2f} ms between two actions",
            f"  losses {self.losses[0]:.6f} ... {self.losses[-1]:.6f}",
        ]
        if self.peer is not None:
            torchs = f"torch.distributed.pipelining {self.peer * 1e3:.2f} ms"
            lines.append(f"  {torchs}: {self.ratio} times its throughput")
        if self.gain is not None:
            gain = f"{self.gain} times the throughput of the other placement"
            lines.append(f"  {gain}, simulated {self.simulated_gain:.3f}")
        if self.difference is not None:
            lines.append(f"  largest relative difference of a loss {self.difference:.1e}")
        return "\n".join(lines)


if __name__ == "__main__":
    main()
