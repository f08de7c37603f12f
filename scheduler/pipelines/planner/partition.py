"""The planner: cuts, replica counts and recomputation for a model on a cluster, for any schedule.

    plan = partition(profile, Cluster.flat(8, Link.parse("10gbit"), memory=16 << 30), "pipedream")

The slowest stage decides how fast a pipeline is. A stage's seconds per period are its compute and step,
divided among its replicas, and what of RS and AG its last backward does not hide; what crosses its borders
must fit into the period too. Weight versions and micro-batches in flight are those of the schedule's program.
The simulator, which knows each stage's slack, then ranks the best pipelines of different depths.

Where a rank holds several stages (interleaved, wpipe), every position has as many replicas, and the stages
are cut as if each had a device of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise, product

import numpy as np

from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.cluster import Cluster
from scheduler.ir.placements import Placement
from scheduler.ir.profile import Border, Profile
from scheduler.pipelines.build import BUCKET, generate
from scheduler.pipelines.planner.partition_input import PartitionInput
from scheduler.pipelines.planner.stage_search import TOLERANCE, Cut, table_of
from scheduler.simulate.lower_pipeline import lower_pipeline
from scheduler.simulate.memory import memory_by_rank
from scheduler.simulate.simulator import run

ROUGHLY = 1e-3
"""The bisection's tolerance for candidates after the first, and for all on more than ``MANY`` devices: the
simulator ranks them, and its favourite need not have the least bottleneck of its depth.
"""
MANY = 64
MOST_BUCKETS = 32


def partition(
    profile: Profile,
    cluster: Cluster,
    schedule: str = "pipedream",
    *,
    microbatches: int = 1,
    recompute: str = "never",
    state: float = 0.0,
    max_stages: int | None = None,
    candidates: int = 4,
    virtual: int | None = None,
    placements: Sequence[Placement] = (),
    borders: Sequence[Border | None] = (),
) -> PipelinePlan:
    """The fastest plan: ``profile`` is of one micro-batch on one device.

    ``state``: bytes of optimizer state per byte of weights. ``recompute``: ``never``, ``always``, or where it
    helps (``auto``). ``candidates``: how many pipelines of different depths the simulator compares.
    ``virtual``: stages on each rank, for schedules that let it be chosen (interleaved). ``placements``: of
    the stages, on tiles or on samples, for which only the cuts are searched then; ``borders``: what tiles
    exchange at each layer.
    """
    problem = PartitionInput(
        profile, cluster, schedule, microbatches, recompute, state, max_stages, virtual, tuple(placements)
    )
    if placements:
        plans = _as_placed(problem, tuple(borders))
    else:
        plans = (_by_depth if problem.virtual == 1 else _by_shape)(problem, candidates)
    best = min(plans, key=lambda plan: plan.period, default=None)
    if best is None:
        raise ValueError(_why_impossible(problem))
    return best


def _by_depth(problem: PartitionInput, candidates: int) -> Iterator[PipelinePlan]:
    """The best pipeline, the best with at most half as many stages, and so on, while one so short can win."""
    most, period = problem.depth, np.inf
    for number in range(candidates):
        if not most:
            return
        search = problem.search(most)
        if number and not search.may_take(period):
            return
        exactly = not number and problem.cluster.size <= MANY
        cut = search.best(TOLERANCE if exactly else ROUGHLY)
        if cut is None:
            return
        yield (plan := _simulated(problem, cut, cut.replicas))
        most, period = len(cut.cuts) // 2, min(period, plan.period)


def _as_placed(problem: PartitionInput, borders: tuple[Border | None, ...]) -> Iterator[PipelinePlan]:
    """The best cuts for given placements. The search does not know halos, the simulator does: from the
    search's cuts on, neighbouring ones are moved by a layer as long as the period falls.
    """
    cut = problem.search(problem.depth).best() if problem.depth else None
    if cut is None:
        return
    best = _simulated(problem, cut, cut.replicas, borders)
    improved = True
    while improved:
        improved = False
        runs = combinations(range(1, len(best.cuts) + 1), 2)
        for (low, high), step in product(runs, (-1, 1)):
            moved = [first + step * (low <= stage < high) for stage, first in enumerate(best.cuts)]
            if not all(a < b for a, b in pairwise((*moved, len(problem.profile.layers)))):
                continue
            plan = _simulated(problem, replace(cut, cuts=tuple(moved)), cut.replicas, borders)
            if plan.period < best.period * (1 - TOLERANCE) and _fits(problem, plan):
                best, improved = plan, True
    yield best


def _by_shape(problem: PartitionInput, candidates: int) -> Iterator[PipelinePlan]:
    """The pipelines whose busiest position has the least to do, of many depths and numbers of replicas."""
    found: list[tuple[float, Cut, tuple[int, ...]]] = []
    for positions in _up_to(problem.depth, 1.25):
        for replicas in _up_to(problem.cluster.size // positions, 2.0):
            strictness = (True, False) if problem.cluster.memory else (True,)
            cuts = [problem.folded(positions, replicas, strict).best(ROUGHLY) for strict in strictness]
            cuts.append(problem.even(positions))  # may fit where the others need too much of one device
            counts = (replicas,) * positions
            found += [(_busiest(problem, cut, positions, replicas), cut, counts) for cut in cuts if cut]
    plans = (
        _simulated(problem, replace(cut, bottleneck=seconds), counts)
        for seconds, cut, counts in sorted(found, key=lambda shape: shape[0])
    )
    yield from islice((plan for plan in plans if _fits(problem, plan)), candidates)


def _up_to(most: int, factor: float) -> list[int]:
    """Numbers from 1 to ``most``, each so much larger than the one before, or by 1."""
    found = [1] if most else []
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * factor))))
    return found


def _busiest(problem: PartitionInput, cut: Cut, positions: int, replicas: int) -> float:
    """Seconds per period of the position with the most to do."""
    from scheduler.pipelines.planner.reachability_kernel import stage_seconds

    table, first = table_of(problem.profile), problem.first(positions, replicas)
    seconds = [0.0] * positions
    for stage, (low, high) in enumerate(pairwise((*cut.cuts, len(problem.profile.layers)))):
        start = first + stage % positions * replicas
        level = problem.cluster.level(start, start + replicas - 1)
        wires = np.array([level.alpha, level.beta])
        again = cut.recompute[stage]
        seconds[stage % positions] += stage_seconds(
            table, low, high, replicas, again, problem.microbatches, wires
        )
    return max(seconds)


def _fits(problem: PartitionInput, plan: PipelinePlan) -> bool:
    if problem.cluster.memory is None:
        return True
    weights = [0] * plan.ranks
    for stage, (low, high) in enumerate(pairwise((*plan.cuts, len(plan.sizes)))):
        for rank in plan.rank_map[stage % len(plan.replicas)]:
            weights[rank] += sum(plan.sizes[low:high])
    needed = [held + problem.state * size for held, size in zip(plan.memory, weights, strict=True)]
    return all(size <= problem.cluster.memory[d] for size, d in zip(needed, plan.devices, strict=True))


def _simulated(
    problem: PartitionInput,
    cut: Cut,
    replicas: tuple[int, ...],
    borders: tuple[Border | None, ...] = (),
) -> PipelinePlan:
    """The plan of a pipeline, with its simulated period and memory. ``replicas``: by position."""
    devices = range(problem.cluster.size - sum(replicas), problem.cluster.size)
    program = generate(
        problem.schedule,
        len(replicas),
        problem.microbatches,
        replicas=1 if problem.placements else replicas,
        placements=problem.placements or None,
        borders=borders,
        profile=problem.profile,
        cuts=cut.cuts,
        recompute=cut.recompute,
        # More buckets would not change the ranking of plans, and thousands of them take minutes to simulate.
        bucket_bytes=max(BUCKET, problem.profile.total_bytes / MOST_BUCKETS),
        **problem.options,
    )
    return PipelinePlan(
        model=problem.profile.name,
        sizes=problem.profile.sizes,
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        cuts=cut.cuts,
        replicas=replicas,
        recompute=cut.recompute,
        placement=program.layout.placement,
        devices=tuple(devices),
        period=run(lower_pipeline(program, problem.profile, problem.cluster.at(devices))).period,
        bottleneck=cut.bottleneck,
        memory=memory_by_rank(program, problem.profile),
        tiles=program.layout.tiles,
    )


def _why_impossible(problem: PartitionInput) -> str:
    if not problem.depth:
        return (
            f"schedule {problem.schedule!r} puts {problem.virtual} stages on a rank, and"
            f" {problem.profile.name!r} has {len(problem.profile.layers)} layers, max_stages is"
            f" {problem.max_stages}; choose a schedule with one stage on a rank"
        )
    layer = max(problem.profile.layers, key=lambda layer: layer.bytes + layer.activation_bytes)
    smallest = min(problem.cluster.memory or (0,))
    return (
        f"no pipeline of {problem.profile.name!r} by {problem.schedule} fits into the memory of"
        f" {problem.cluster.size} devices: the smallest has {smallest:,} bytes, layer {layer.name!r} alone"
        f" {layer.bytes:,} bytes of weights and {layer.activation_bytes:,} of activations; allow"
        " recomputation, choose a schedule with fewer versions (1f1b), or use larger or more devices"
    )
