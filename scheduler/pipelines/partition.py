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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, islice, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Placement
from scheduler.ir.link import Cluster
from scheduler.ir.profile import Border, Profile
from scheduler.pipelines.build import BUCKET, generate, get, reduction_of, stage_count, virtual_option
from scheduler.simulate.costs import memory_by_rank
from scheduler.simulate.lowering import lower_pipeline
from scheduler.simulate.simulator import run

if TYPE_CHECKING:
    from scheduler.pipelines.reachability_kernel import SearchInput

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
    shapes: list[tuple[float, StageCut, tuple[int, ...]]] = []
    for positions in _up_to(problem.depth, 1.25):
        for replicas in _up_to(problem.cluster.size // positions, 2.0):
            strictness = (True, False) if problem.cluster.memory else (True,)
            cuts = [problem.folded(positions, replicas, strict).best(ROUGHLY) for strict in strictness]
            cuts.append(problem.even(positions))  # may fit where the others need too much of one device
            counts = (replicas,) * positions
            shapes += [(_busiest(problem, cut, positions, replicas), cut, counts) for cut in cuts if cut]
    plans = (
        _simulated(problem, replace(cut, bottleneck=seconds), counts)
        for seconds, cut, counts in sorted(shapes, key=lambda shape: shape[0])
    )
    yield from islice((plan for plan in plans if _fits(problem, plan)), candidates)


def _up_to(most: int, factor: float) -> list[int]:
    """Numbers from 1 to ``most``, each so much larger than the one before, or by 1."""
    numbers = [1] if most else []
    while numbers and numbers[-1] < most:
        numbers.append(min(most, max(numbers[-1] + 1, int(numbers[-1] * factor))))
    return numbers


def _busiest(problem: PartitionInput, cut: StageCut, positions: int, replicas: int) -> float:
    """Seconds per period of the position with the most to do."""
    from scheduler.pipelines.reachability_kernel import stage_seconds

    table, first = table_of(problem.profile, problem.sharded), problem.first(positions, replicas)
    seconds = [0.0] * positions
    for stage, (low, high) in enumerate(pairwise((*cut.cuts, len(problem.profile.layers)))):
        start = first + stage % positions * replicas
        wires = problem.wires(range(start, start + replicas))
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
    problem: PartitionInput, cut: StageCut, replicas: tuple[int, ...], borders: tuple[Border | None, ...] = ()
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


# -- what the planner is asked: a model, a cluster and a schedule; and the searches that follow from them ----

RECOMPUTE = {"never": (True, False), "auto": (True, True), "always": (False, True)}
MOST_LAYERS = 32_000


@dataclass(frozen=True)
class PartitionInput:
    """A model, a cluster and a schedule. ``virtual_stages``: how many a rank holds, where that can be
    chosen (None: as the schedule does). ``placements`` of all stages, where they are given.
    """

    profile: Profile
    cluster: Cluster
    schedule: str
    microbatches: int = 1
    recompute: str = "never"
    state: float = 0.0
    max_stages: int | None = None
    virtual_stages: int | None = None
    placements: tuple[Placement, ...] = ()

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}")
        if len(self.profile.layers) > MOST_LAYERS:
            raise ValueError(f"the planner takes up to {MOST_LAYERS} layers, got {len(self.profile.layers)}")
        if self.microbatches < 1 or not 0 <= self.state < np.inf:
            given = f"got {self.microbatches} and {self.state}"
            raise ValueError(f"needs at least 1 micro-batch and a state of at least 0, {given}")
        if self.max_stages is not None and self.max_stages < 1:
            raise ValueError(f"max_stages must be at least 1, got {self.max_stages}")
        needed = sum(each.size for each in self.placements)
        if self.placements and (self.virtual > 1 or needed != self.cluster.size):
            raise ValueError(
                "placements need a schedule with one stage on a rank, and take all devices: schedule"
                f" {self.schedule!r} puts {self.virtual} on a rank, they take {needed} of"
                f" {self.cluster.size} devices"
            )

    @cached_property
    def options(self) -> dict[str, Any]:
        if self.virtual_stages is None:
            return {}
        option = virtual_option(self.schedule, self.virtual_stages)
        if not option:
            raise ValueError(f"schedule {self.schedule!r} does not let virtual be chosen; leave it out")
        return option

    @property
    def modes(self) -> np.ndarray:
        """Whether stages may keep their activations, and whether they may recompute them."""
        return np.array(RECOMPUTE[self.recompute])

    @property
    def sharded(self) -> bool:
        """Whether replicas step shards of the parameters, and no whole ones."""
        return reduction_of(self.schedule) == "scatter"

    @cached_property
    def virtual(self) -> int:
        """How many stages a rank holds."""
        return stage_count(get(self.schedule)(1, self.microbatches, **self.options))

    @cached_property
    def depth(self) -> int:
        """The most positions of a pipeline."""
        if self.placements:
            return len(self.placements) if self._allows(len(self.placements)) else 0
        stages = min(len(self.profile.layers), self.max_stages or len(self.profile.layers))
        most = min(self.cluster.size, stages // self.virtual)
        if most and not self._allows(most):  # bundles have two, wpipe as many as micro-batches
            return next((n for n in range(1, most) if not self._allows(n + 1)), most)
        return most

    def _allows(self, positions: int) -> bool:
        try:
            get(self.schedule)(positions, self.microbatches, **self.options)
        except ValueError:
            return False
        return True

    def kept(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """By stage, counted from the end on from 1: how often its weights' bytes are needed (all versions,
        and what the optimizer keeps), and micro-batches in flight.
        """
        stages = positions * self.virtual
        if self.cluster.memory is None:
            return np.zeros(stages + 1), np.zeros(stages + 1, np.int64)
        layout = generate(self.schedule, positions, self.microbatches, **self.options).layout
        copies = [0.0, *(versions + self.state for versions in layout.versions[::-1])]
        # Fewer further on would be no error, but the search needs counts that do not fall.
        in_flight = np.maximum.accumulate([0, *layout.activations[::-1]])
        return np.maximum.accumulate(copies), in_flight.astype(np.int64)

    def search(self, most: int) -> StageSearch:
        """For pipelines of at most ``most`` stages, each on devices of its own."""
        from scheduler.pipelines.reachability_kernel import SearchInput

        count, cluster = self.cluster.size, self.cluster
        border, ring = np.zeros((count + 1, 2)), np.zeros((count + 1, count + 1, 2))
        memory = np.full((count + 1, count + 1), np.inf)
        for d in range(1, count + 1):
            first = count - d
            if first:
                level = cluster.level(first - 1, first)
                border[d] = level.alpha, level.beta
            for r in range(1, d + 1):
                ring[d, r] = self.wires(range(first, first + r))
                if cluster.memory is not None:
                    memory[d, r] = min(cluster.memory[first : first + r])
        copies, in_flight = self.kept(min(self.depth, most))
        if self.placements:
            wanted = np.zeros_like(memory, dtype=bool)
            sizes = [each.size for each in self.placements]
            wanted[list(accumulate(reversed(sizes))), sizes[::-1]] = True
            memory[~wanted] = -np.inf  # nothing fits there, so stages are where they were placed
        table, all_devices = table_of(self.profile, self.sharded), bool(self.placements)
        given = SearchInput(table, self.microbatches, copies, in_flight, ring, border, memory, self.modes)
        return StageSearch(given._replace(all_devices=all_devices))

    def folded(self, positions: int, replicas: int, strict: bool) -> StageSearch:
        """For ``virtual`` stages on each position; each stage has a device of its own, with a share of the
        memory (not ``strict``: with all of it).
        """
        from scheduler.pipelines.reachability_kernel import SearchInput

        stages, cluster, first = positions * self.virtual, self.cluster, self.first(positions, replicas)
        border, memory = np.zeros((stages + 1, 2)), np.full((stages + 1, stages + 1), np.inf)
        for d in range(1, stages + 1):
            place = (stages - d) % positions
            mine = range(first + place * replicas, first + (place + 1) * replicas)
            before = first + (place - 1) % positions * replicas
            level = cluster.level(min(before, mine[0]), max(before + replicas - 1, mine[-1]))
            border[d] = level.alpha, level.beta
            if cluster.memory is not None:
                least = min(cluster.memory[device] for device in mine)
                memory[d, 1] = least / self.virtual if strict else least
        copies, in_flight = self.kept(positions)
        table, ring = table_of(self.profile, self.sharded, replicas), np.zeros((stages + 1, stages + 1, 2))
        given = SearchInput(table, self.microbatches, copies, in_flight, ring, border, memory, self.modes)
        return StageSearch(given._replace(most_replicas=1, all_devices=True))

    def even(self, positions: int) -> StageCut:
        """Stages of equally many layers, all recomputed where recomputation is asked for."""
        layers, stages = len(self.profile.layers), positions * self.virtual
        cuts = tuple(stage * layers // stages for stage in range(stages))
        return StageCut(cuts, (1,) * stages, (self.recompute != "never",) * stages, 0.0)

    def wires(self, devices: range) -> np.ndarray:
        """Start-up and seconds per byte of equal wires on which a ring of these devices takes as long as
        their exchange does, first and last segments of two tiers not counted.
        """
        count, link = max(2, len(devices)), self.cluster.exchange(devices, self.sharded)
        return np.array([link.alpha / (count - 1), link.beta * count / (count - 1)])

    def first(self, positions: int, replicas: int) -> int:
        """The first device that is used: the last ones are."""
        return self.cluster.size - positions * replicas


# -- the search for cuts, replica counts and recomputation: the least time of the slowest stage --------------

# For a limit on it, a dynamic programme over the devices used and the first layer, from the end, says whether
# some pipeline keeps it; bisection finds the least limit.

TOLERANCE = 1e-6


@dataclass(frozen=True)
class StageCut:
    """A pipeline as the search sees it: ``replicas`` and ``recompute`` by stage; ``bottleneck``: seconds of
    its slowest stage.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    bottleneck: float


class StageSearch:
    def __init__(self, given: SearchInput) -> None:
        self.given, self.table = given, given.table
        self.devices, self.layers = len(given.border) - 1, given.table.shape[1] - 1
        self._choice = np.zeros((4, self.devices + 1, self.layers + 1), np.int16)

    def best(self, tolerance: float = TOLERANCE) -> StageCut | None:
        """The pipeline with the least bottleneck; None where none fits into memory."""
        compute = float(self.table[0, -1] + self.table[1, -1])
        low = self.given.microbatches * compute / self.devices
        most = self.given.microbatches * (compute + float(self.table[0, -1]))
        cut, limit = None, max(low, 1e-300) * 1.25
        while cut is None:
            cut = self._within(limit)
            if cut is None and limit == np.inf:
                return None
            low, limit = (low, limit) if cut else (limit, limit * 2 if limit < 4 * most else np.inf)
        while cut.bottleneck - low > tolerance * cut.bottleneck:
            middle = (cut.bottleneck + low) / 2
            better = self._within(middle)
            if better is None:
                low = middle
            else:
                cut = better
        return cut

    def may_take(self, period: float) -> bool:
        """Whether a pipeline might reach this period in the simulator. Only compute and messages between
        stages count: how much of RS and AG hides is not known before the simulation.
        """
        free = self.given._replace(ring=np.zeros_like(self.given.ring))
        return len(self.given.copies) > 1 and self._reach(period, free)[0] > 0

    def _within(self, limit: float) -> StageCut | None:
        stages, devices = self._reach(limit, self.given)
        return None if stages < 0 else self._trace(stages, devices)

    def _reach(self, limit: float, given: SearchInput) -> tuple[int, int]:
        from scheduler.pipelines.reachability_kernel import reachable

        stages, devices = reachable(limit, given, self._choice)
        return int(stages), int(devices)

    def _trace(self, stages: int, devices: int) -> StageCut:
        cuts, replicas, recompute, seconds = [], [], [], []
        layer = 0
        for _ in range(stages):
            count, after, again, _ = (int(value) for value in self._choice[:, devices, layer])
            cuts.append(layer)
            replicas.append(count)
            recompute.append(bool(again))
            seconds.append(self._seconds(layer, after, count, bool(again), devices))
            layer, devices = after, devices - count
        return StageCut(tuple(cuts), tuple(replicas), tuple(recompute), max(seconds))

    def _seconds(self, first: int, last: int, replicas: int, again: bool, devices: int) -> float:
        """Seconds of a stage per period: its work or the messages across one of its borders, whichever is
        longer.
        """
        from scheduler.pipelines.reachability_kernel import crossing_seconds, stage_seconds

        table, batches, border = self.table, self.given.microbatches, self.given.border
        wires = self.given.ring[devices, replicas]
        work = stage_seconds(table, first, last, replicas, again, batches, wires)
        sides = [(first, devices), (last, devices - replicas)]
        return max(work, *(crossing_seconds(table, n, replicas, batches, border[d]) for n, d in sides))


def table_of(profile: Profile, sharded: bool, replicas: int = 1) -> np.ndarray:
    """Sums over all layers before each one: forward, backward, bytes, activations, update; in row 5 the bytes
    that cross the border before it; then again sums, of the fixed part of the compute, of what traffic takes,
    of the bytes that replicas exchange, of the update that each replica makes by itself, and of gradients.
    ``sharded``: each steps a part of the parameters. ``replicas``: of one of so many replicas of every layer,
    which then are single devices.
    """
    layers = profile.layers
    parts = [layer.fixed + (1 - layer.fixed) / replicas for layer in layers]
    activations = [layer.activation_bytes / replicas for layer in layers]
    exchanged = [layer.exchanged(sharded) for layer in layers]
    traffic = [size * profile.traffic_per_byte for size in exchanged]
    sent, updates = (replicas - 1) / replicas, [layer.bytes * profile.update_per_byte for layer in layers]
    columns = [
        [layer.forward * part for layer, part in zip(layers, parts)],
        [layer.backward * part for layer, part in zip(layers, parts)],
        [layer.bytes for layer in layers],
        activations,
        [sharded * seconds / replicas + sent * t for seconds, t in zip(updates, traffic)],
        [layer.fixed * (layer.forward + layer.backward) for layer in layers],
        traffic,
        exchanged,
        [(not sharded) * seconds for seconds in updates],
        [layer.bytes * layer.grad_share for layer in layers],
    ]
    sums = np.zeros((11, len(layers) + 1))
    sums[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10], 1:] = np.cumsum(np.array(columns, float), axis=1)
    sums[5, 1:] = activations
    return sums
