"""What the planner is asked: a model, a cluster and a schedule; and the searches that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from scheduler.ir.cluster import Cluster
from scheduler.ir.placements import Placement
from scheduler.ir.profile import Profile
from scheduler.pipelines.build import generate, get, stage_count, virtual_option
from scheduler.pipelines.planner.stage_search import Cut, StageSearch, table_of

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
        if self.microbatches < 1 or self.state < 0:
            given = f"got {self.microbatches} and {self.state}"
            raise ValueError(f"needs at least 1 micro-batch and no negative state, {given}")
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
        found = virtual_option(self.schedule, self.virtual_stages)
        if not found:
            raise ValueError(f"schedule {self.schedule!r} does not let virtual be chosen; leave it out")
        return found

    @property
    def modes(self) -> np.ndarray:
        """Whether stages may keep their activations, and whether they may recompute them."""
        return np.array(RECOMPUTE[self.recompute])

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
        the gradient, and what the optimizer keeps), and micro-batches in flight.
        """
        stages = positions * self.virtual
        if self.cluster.memory is None:
            return np.zeros(stages + 1), np.zeros(stages + 1, np.int64)
        layout = generate(self.schedule, positions, self.microbatches, **self.options).layout
        copies = [0.0, *(versions + 1 + self.state for versions in layout.versions[::-1])]
        # Fewer further on would be no error, but the search needs counts that do not fall.
        in_flight = np.maximum.accumulate([0, *layout.activations[::-1]])
        return np.maximum.accumulate(copies), in_flight.astype(np.int64)

    def search(self, most: int) -> StageSearch:
        """For pipelines of at most ``most`` stages, each on devices of its own."""
        from scheduler.pipelines.planner.reachability_kernel import SearchInput

        count, cluster = self.cluster.size, self.cluster
        border, ring = np.zeros((count + 1, 2)), np.zeros((count + 1, count + 1, 2))
        memory = np.full((count + 1, count + 1), np.inf)
        for d in range(1, count + 1):
            first = count - d
            if first:
                level = cluster.level(first - 1, first)
                border[d] = level.alpha, level.beta
            for r in range(1, d + 1):
                level = cluster.level(first, first + r - 1)
                ring[d, r] = level.alpha, level.beta
                if cluster.memory is not None:
                    memory[d, r] = min(cluster.memory[first : first + r])
        copies, in_flight = self.kept(min(self.depth, most))
        if self.placements:
            wanted = np.zeros_like(memory, dtype=bool)
            sizes = [each.size for each in self.placements]
            wanted[list(accumulate(reversed(sizes))), sizes[::-1]] = True
            memory[~wanted] = -np.inf  # nothing fits there, so stages are where they were placed
        table, all_devices = table_of(self.profile), bool(self.placements)
        given = SearchInput(table, self.microbatches, copies, in_flight, ring, border, memory, self.modes)
        return StageSearch(given._replace(all_devices=all_devices))

    def folded(self, positions: int, replicas: int, strict: bool) -> StageSearch:
        """For ``virtual`` stages on each position; each stage has a device of its own, with a share of the
        memory (not ``strict``: with all of it).
        """
        from scheduler.pipelines.planner.reachability_kernel import SearchInput

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
        table, ring = table_of(self.profile, replicas), np.zeros((stages + 1, stages + 1, 2))
        given = SearchInput(table, self.microbatches, copies, in_flight, ring, border, memory, self.modes)
        return StageSearch(given._replace(most_replicas=1, all_devices=True))

    def even(self, positions: int) -> Cut:
        """As many layers on each stage, all recomputed where recomputation is asked for."""
        layers, stages = len(self.profile.layers), positions * self.virtual
        cuts = tuple(stage * layers // stages for stage in range(stages))
        return Cut(cuts, (1,) * stages, (self.recompute != "never",) * stages, 0.0)

    def first(self, positions: int, replicas: int) -> int:
        """The first device that is used: the last ones are."""
        return self.cluster.size - positions * replicas
