"""The planner: cuts, replica counts and recomputation for a model on a cluster.

    plan = partition(profile, Cluster.flat(8, Link.parse("10gbit"), memory=16 << 30), "pipedream")

The slowest stage decides how fast a pipeline is. For a limit on it, a dynamic programme over stages counted
from the end (which is what versions and activations depend on), devices used and first layer says whether
some pipeline keeps it; bisection finds the least limit. A stage's seconds per period are its compute and
step, divided among its replicas, and what of RS and AG its last backward does not hide; what crosses its
borders must fit into the period too. The simulator, which knows each stage's slack, then ranks the best
pipelines of different depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.cluster import Cluster
from scheduler.ir.profile import Profile
from scheduler.pipelines.build import BUCKET, generate
from scheduler.simulate.lower_pipeline import lower_pipeline
from scheduler.simulate.memory import memory_by_rank
from scheduler.simulate.simulator import run

RECOMPUTE = {"never": (True, False), "auto": (True, True), "always": (False, True)}
TOLERANCE = 1e-6
ROUGHLY = 1e-3
"""The bisection's tolerance for candidates after the first, and for all on more than ``MANY`` devices: the
simulator ranks them, and its favourite need not have the least bottleneck of its depth.
"""
MANY = 64
MOST_LAYERS = 32_000
MOST_BUCKETS = 32


def kept(schedule: str, depth: int, microbatches: int) -> tuple[int, int]:
    """Weight versions and micro-batches in flight of the ``depth``-th stage from the end."""
    ahead = depth - 1
    if schedule in ("pipedream", "ashpipe"):
        return -(-ahead // microbatches) + 1, depth
    if schedule == "2bw":
        return 2, min(ahead, microbatches) + 1
    if schedule == "1f1b":
        return 1, min(depth, microbatches)
    if schedule == "gpipe":
        return 1, microbatches
    raise ValueError(
        f"schedule {schedule!r} cannot be planned; choose pipedream, ashpipe, 2bw, 1f1b or gpipe"
    )


@dataclass(frozen=True)
class Cut:
    """A pipeline as the dynamic programme sees it; ``bottleneck``: seconds of its slowest stage."""

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    bottleneck: float


class PartitionInput:
    """A model, a cluster and a schedule, as the arrays of the dynamic programme."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        schedule: str,
        microbatches: int = 1,
        recompute: str = "never",
        state: float = 0.0,
        max_stages: int | None = None,
    ) -> None:
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        if len(profile.layers) > MOST_LAYERS:
            raise ValueError(f"the planner takes up to {MOST_LAYERS} layers, got {len(profile.layers)}")
        if microbatches < 1 or state < 0:
            raise ValueError(
                f"needs at least 1 micro-batch and no negative state, got {microbatches} and {state}"
            )
        self.profile, self.cluster, self.schedule = profile, cluster, schedule
        self.microbatches, self.modes = microbatches, np.array(RECOMPUTE[recompute])
        self.depth = min(cluster.size, len(profile.layers), max_stages or cluster.size)
        self.table = _table(profile)
        each = [kept(schedule, max(1, depth), microbatches) for depth in range(self.depth + 1)]
        # All versions, the gradient, and what the optimizer keeps.
        self.copies = np.array([versions + 1 + state for versions, _ in each], float)
        self.in_flight = np.array([batches for _, batches in each], np.int64)
        self._choice = np.zeros((4, cluster.size + 1, len(profile.layers) + 1), np.int16)
        self._devices()

    def _devices(self) -> None:
        """Links and memory limits of a stage on ``r`` devices that start ``d`` devices before the end."""
        count, cluster = self.cluster.size, self.cluster
        self.border = np.zeros((count + 1, 2))
        self.ring = np.zeros((count + 1, count + 1, 2))
        self.memory = np.full((count + 1, count + 1), np.inf)
        for d in range(1, count + 1):
            first = count - d
            if first:
                level = cluster.level(first - 1, first)
                self.border[d] = level.alpha, level.beta
            for r in range(1, d + 1):
                level = cluster.level(first, first + r - 1)
                self.ring[d, r] = level.alpha, level.beta
                if cluster.memory is not None:
                    self.memory[d, r] = min(cluster.memory[first : first + r])

    def best(self, max_stages: int | None = None, tolerance: float = TOLERANCE) -> Cut | None:
        """The pipeline with the least bottleneck; None where none fits into memory."""
        stages = min(self.depth, max_stages or self.depth)
        low = self.microbatches * self.profile.compute / self.cluster.size
        most = self.microbatches * (self.profile.compute + sum(la.forward for la in self.profile.layers))
        found, limit = None, max(low, 1e-300) * 1.25
        while found is None:
            found = self._within(limit, stages)
            if found is None and limit == np.inf:
                return None
            low, limit = (low, limit) if found else (limit, limit * 2 if limit < 4 * most else np.inf)
        while found.bottleneck - low > tolerance * found.bottleneck:
            middle = (found.bottleneck + low) / 2
            better = self._within(middle, stages)
            if better is None:
                low = middle
            else:
                found = better
        return found

    def may_take(self, period: float, max_stages: int) -> bool:
        """Whether a pipeline of at most ``max_stages`` stages might reach this period in the simulator.

        Only compute and messages between stages count: how much of RS and AG hides is not known before the
        simulation.
        """
        return max_stages > 0 and self._reach(period, max_stages, np.zeros_like(self.ring))[0] > 0

    def _within(self, limit: float, most: int) -> Cut | None:
        """A pipeline of at most ``most`` stages, none of which takes longer than ``limit``."""
        stages, devices = self._reach(limit, most, self.ring)
        return None if stages < 0 else self._trace(stages, devices)

    def _reach(self, limit: float, most: int, ring: np.ndarray) -> tuple[int, int]:
        from scheduler.pipelines.planner.reachability_kernel import reachable

        stages, devices = reachable(
            limit,
            self.table,
            self.microbatches,
            self.copies[: most + 1],
            self.in_flight[: most + 1],
            ring,
            self.border,
            self.memory,
            self.modes,
            self.cluster.size,
            False,
            self._choice,
        )
        return int(stages), int(devices)

    def _trace(self, stages: int, devices: int) -> Cut:
        cuts, replicas, recompute, seconds = [], [], [], []
        layer = 0
        for _ in range(stages):
            count, after, again, _ = (int(value) for value in self._choice[:, devices, layer])
            cuts.append(layer)
            replicas.append(count)
            recompute.append(bool(again))
            seconds.append(self.seconds(layer, after, count, bool(again), devices))
            layer, devices = after, devices - count
        return Cut(tuple(cuts), tuple(replicas), tuple(recompute), max(seconds))

    def seconds(self, first: int, last: int, replicas: int, again: bool, devices: int) -> float:
        """Seconds of a stage per period: its work or the messages across one of its borders, whichever is
        longer.
        """
        from scheduler.pipelines.planner.reachability_kernel import stage_seconds

        work = stage_seconds(
            self.table, first, last, replicas, again, self.microbatches, self.ring[devices, replicas]
        )
        sides = [(first, devices), (last, devices - replicas)]
        return max(work, *(self._crossing(layer, d, replicas) for layer, d in sides))

    def _crossing(self, layer: int, devices: int, replicas: int) -> float:
        if layer in (0, len(self.profile.layers)):
            return 0.0
        alpha, beta = self.border[devices]
        return float(self.microbatches * (alpha + beta * self.table[5, layer] / replicas))


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
) -> PipelinePlan:
    """The fastest plan: ``profile`` is of one micro-batch on one device.

    ``state``: bytes of optimizer state per byte of weights. ``recompute``: ``never``, ``always``, or where it
    helps (``auto``). ``candidates``: how many pipelines of different depths the simulator compares.
    """
    problem = PartitionInput(profile, cluster, schedule, microbatches, recompute, state, max_stages)
    cut = problem.best(tolerance=TOLERANCE if cluster.size <= MANY else ROUGHLY)
    if cut is None:
        raise ValueError(_why_impossible(problem))
    best = _simulated(problem, cut)
    for _ in range(1, candidates):
        # Further candidates: the best with at most half as many stages, and so on, while one so short can
        # win.
        most = len(cut.cuts) // 2
        cut = problem.best(most, ROUGHLY) if problem.may_take(best.period, most) else None
        if cut is None:
            break
        best = min(best, _simulated(problem, cut), key=lambda candidate: candidate.period)
    return best


def _simulated(problem: PartitionInput, cut: Cut) -> PipelinePlan:
    """Return the plan of a pipeline, with its simulated period and memory."""
    devices = range(problem.cluster.size - sum(cut.replicas), problem.cluster.size)
    program = generate(
        problem.schedule,
        len(cut.cuts),
        problem.microbatches,
        replicas=cut.replicas,
        profile=problem.profile,
        cuts=cut.cuts,
        recompute=cut.recompute,
        # More buckets would not change the ranking of plans, and thousands of them take minutes to simulate.
        bucket_bytes=max(BUCKET, problem.profile.total_bytes / MOST_BUCKETS),
    )
    return PipelinePlan(
        model=problem.profile.name,
        sizes=problem.profile.sizes,
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        cuts=cut.cuts,
        replicas=cut.replicas,
        recompute=cut.recompute,
        placement=program.layout.placement,
        devices=tuple(devices),
        period=run(lower_pipeline(program, problem.profile, problem.cluster.at(devices))).period,
        bottleneck=cut.bottleneck,
        memory=memory_by_rank(program, problem.profile),
    )


def _why_impossible(problem: PartitionInput) -> str:
    layer = max(problem.profile.layers, key=lambda layer: layer.bytes + layer.activation_bytes)
    smallest = min(problem.cluster.memory or (0,))
    return (
        f"no pipeline of {problem.profile.name!r} by {problem.schedule} fits into the memory of"
        f" {problem.cluster.size} devices: the smallest has {smallest:,} bytes, layer {layer.name!r} alone"
        f" {layer.bytes:,} bytes of weights and {layer.activation_bytes:,} of activations; allow"
        " recomputation, choose a schedule with fewer versions (1f1b), or use larger or more devices"
    )


def _table(profile: Profile) -> np.ndarray:
    """Sums over all layers before each one: forward, backward, bytes, activations, update; in row 5 the bytes
    that cross the border before it; then again sums, of the fixed part of the compute and of what traffic
    takes.
    """
    layers = profile.layers
    activations = [layer.activation_bytes for layer in layers]
    columns = [
        [layer.forward for layer in layers],
        [layer.backward for layer in layers],
        [layer.bytes for layer in layers],
        activations,
        [layer.bytes * profile.update_per_byte for layer in layers],
        [layer.fixed * (layer.forward + layer.backward) for layer in layers],
        [layer.bytes * profile.traffic_per_byte for layer in layers],
    ]
    sums = np.zeros((8, len(layers) + 1))
    sums[[0, 1, 2, 3, 4, 6, 7], 1:] = np.cumsum(np.array(columns, float), axis=1)
    sums[5, 1:] = activations
    return sums
