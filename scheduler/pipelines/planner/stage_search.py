"""The search for cuts, replica counts and recomputation: the least time of the slowest stage.

For a limit on it, a dynamic programme over the devices used and the first layer, from the end, says whether
some pipeline keeps it; bisection finds the least limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scheduler.ir.profile import Profile

if TYPE_CHECKING:
    from scheduler.pipelines.planner.reachability_kernel import SearchInput

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Cut:
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

    def best(self, tolerance: float = TOLERANCE) -> Cut | None:
        """The pipeline with the least bottleneck; None where none fits into memory."""
        compute = float(self.table[0, -1] + self.table[1, -1])
        low = self.given.microbatches * compute / self.devices
        most = self.given.microbatches * (compute + float(self.table[0, -1]))
        found, limit = None, max(low, 1e-300) * 1.25
        while found is None:
            found = self._within(limit)
            if found is None and limit == np.inf:
                return None
            low, limit = (low, limit) if found else (limit, limit * 2 if limit < 4 * most else np.inf)
        while found.bottleneck - low > tolerance * found.bottleneck:
            middle = (found.bottleneck + low) / 2
            better = self._within(middle)
            if better is None:
                low = middle
            else:
                found = better
        return found

    def may_take(self, period: float) -> bool:
        """Whether a pipeline might reach this period in the simulator. Only compute and messages between
        stages count: how much of RS and AG hides is not known before the simulation.
        """
        free = self.given._replace(ring=np.zeros_like(self.given.ring))
        return len(self.given.copies) > 1 and self._reach(period, free)[0] > 0

    def _within(self, limit: float) -> Cut | None:
        stages, devices = self._reach(limit, self.given)
        return None if stages < 0 else self._trace(stages, devices)

    def _reach(self, limit: float, given: SearchInput) -> tuple[int, int]:
        from scheduler.pipelines.planner.reachability_kernel import reachable

        stages, devices = reachable(limit, given, self._choice)
        return int(stages), int(devices)

    def _trace(self, stages: int, devices: int) -> Cut:
        cuts, replicas, recompute, seconds = [], [], [], []
        layer = 0
        for _ in range(stages):
            count, after, again, _ = (int(value) for value in self._choice[:, devices, layer])
            cuts.append(layer)
            replicas.append(count)
            recompute.append(bool(again))
            seconds.append(self._seconds(layer, after, count, bool(again), devices))
            layer, devices = after, devices - count
        return Cut(tuple(cuts), tuple(replicas), tuple(recompute), max(seconds))

    def _seconds(self, first: int, last: int, replicas: int, again: bool, devices: int) -> float:
        """Seconds of a stage per period: its work or the messages across one of its borders, whichever is
        longer.
        """
        from scheduler.pipelines.planner.reachability_kernel import stage_seconds

        wires = self.given.ring[devices, replicas]
        work = stage_seconds(self.table, first, last, replicas, again, self.given.microbatches, wires)
        sides = [(first, devices), (last, devices - replicas)]
        return max(work, *(self._crossing(layer, d, replicas) for layer, d in sides))

    def _crossing(self, layer: int, devices: int, replicas: int) -> float:
        if layer in (0, self.layers):
            return 0.0
        alpha, beta = self.given.border[devices]
        return float(self.given.microbatches * (alpha + beta * self.table[5, layer] / replicas))


def table_of(profile: Profile, replicas: int = 1) -> np.ndarray:
    """Sums over all layers before each one: forward, backward, bytes, activations, update; in row 5 the bytes
    that cross the border before it; then again sums, of the fixed part of the compute and of what traffic
    takes. ``replicas``: of one of so many replicas of every layer, which then are single devices.
    """
    layers = profile.layers
    parts = [layer.fixed + (1 - layer.fixed) / replicas for layer in layers]
    activations = [layer.activation_bytes / replicas for layer in layers]
    traffic = [layer.bytes * profile.traffic_per_byte for layer in layers]
    moved = 2.0 * (replicas - 1) / replicas
    columns = [
        [layer.forward * part for layer, part in zip(layers, parts)],
        [layer.backward * part for layer, part in zip(layers, parts)],
        [layer.bytes for layer in layers],
        activations,
        [la.bytes * profile.update_per_byte / replicas + moved * t for la, t in zip(layers, traffic)],
        [layer.fixed * (layer.forward + layer.backward) for layer in layers],
        traffic,
    ]
    sums = np.zeros((8, len(layers) + 1))
    sums[[0, 1, 2, 3, 4, 6, 7], 1:] = np.cumsum(np.array(columns, float), axis=1)
    sums[5, 1:] = activations
    return sums
