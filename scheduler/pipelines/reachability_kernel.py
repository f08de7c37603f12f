"""The dynamic programme of the planner, compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

FINE, COARSE = 64, 8
"""A stage with more replicas than ``FINE`` has a multiple of ``COARSE`` of them: all counts would take
minutes for hundreds of devices, and bring such a stage at most one replica in nine.
"""


class SearchInput(NamedTuple):
    """``table``: sums over layers, see `stage_seconds`. ``ring[d, r]`` and ``memory[d, r]`` are those of r
    devices from d before the end on, ``border[d]`` the wire between device d before the end and the one
    before it. ``copies[k]`` and ``in_flight[k]`` belong to the k-th stage from the end, do not fall as k
    rises, and say how many stages there may be. ``modes``: without recomputation, with it. With
    ``all_devices`` a pipeline uses every device.
    """

    table: np.ndarray
    microbatches: int
    copies: np.ndarray
    in_flight: np.ndarray
    ring: np.ndarray
    border: np.ndarray
    memory: np.ndarray
    modes: np.ndarray
    most_replicas: int = 1 << 30
    all_devices: bool = False


@njit(cache=True)
def stage_seconds(
    table: np.ndarray, first: int, last: int, replicas: int, again: bool, batches: int, ring: np.ndarray
) -> float:
    """Seconds per period of layers ``first`` to ``last - 1``: compute, step, and what of RS and AG the last
    backward does not hide.

    ``table`` holds sums up to each layer: forward, backward, bytes, activations, update, (a border's bytes),
    what of the compute stays where a replica has fewer rows, what traffic takes from it, the bytes that
    replicas exchange, the update of whole parameters, and the bytes of gradients. ``ring`` is start-up and
    seconds per byte of one message.
    """
    forward = table[0, last] - table[0, first]
    backward = table[1, last] - table[1, first]
    exchanged = table[8, last] - table[8, first]
    whole = forward + backward
    fixed = (table[6, last] - table[6, first]) / whole if whole > 0 else 0.0
    part = fixed + (1.0 - fixed) / replicas
    sync = (replicas - 1) * (2.0 * ring[0] + ring[1] * exchanged / replicas)
    exposed = max(0.0, sync - backward * part)
    update = (table[4, last] - table[4, first]) / replicas + table[9, last] - table[9, first]
    update += (replicas - 1) / replicas * (table[7, last] - table[7, first])
    work = whole + forward if again else whole
    return batches * work * part + exposed + update


@njit(cache=True)
def stage_memory(
    table: np.ndarray, first: int, last: int, replicas: int, again: bool, copies: float, batches: int
) -> float:
    """Bytes of a stage on one of its devices: ``copies`` of its weights, ``batches`` in flight."""
    weights = copies * (table[2, last] - table[2, first]) + table[10, last] - table[10, first]
    activations = table[3, last] - table[3, first]
    if again:
        return weights + (batches * table[5, first] + activations) / replicas
    return weights + batches * activations / replicas


@njit(cache=True)
def reachable(limit: float, given: SearchInput, choice: np.ndarray) -> tuple[int, int]:
    """Number of stages and of devices of a pipeline whose every stage takes at most ``limit`` seconds, or
    (-1, -1).

    Fills ``choice[:, d, i]`` with (replicas, first layer of the next stage, recompute, stages) for the
    first stage of a pipeline of layers i and above on the last d devices; 0 replicas where there is none.

    As copies and micro-batches in flight do not fall with more stages, of two pipelines of the same layers on
    the same devices the one with fewer stages is never worse, and only it is kept.
    """
    table, batches, ring, border = given.table, given.microbatches, given.ring, given.border
    copies, in_flight, memory = given.copies, given.in_flight, given.memory
    stages, devices, layers = len(copies) - 1, choice.shape[1] - 1, choice.shape[2] - 1
    replicas, after_it, again, stage = choice[0], choice[1], choice[2], choice[3]
    replicas[:] = 0
    replicas[0, layers] = 1
    stage[0, layers] = 0
    work = batches * (table[0] + table[1])
    fixed = batches * table[6]
    # By number of devices after a cut: the lowest and the highest layer at which the cut can be, because the
    # devices after it and the devices before it must each suffice for their layers.
    lowest_cut, highest_cut = np.zeros(devices + 1, np.int64), np.zeros(devices + 1, np.int64)
    for d in range(devices + 1):
        lowest_cut[d] = np.searchsorted(work, work[layers] - limit * d * (1 + 1e-9))
        highest_cut[d] = np.searchsorted(work, limit * (devices - d) * (1 + 1e-9), side="right")
    # By number of devices: the lowest and the highest layer of pipelines that the last round found.
    low, high = np.full(devices + 1, layers + 1), np.full(devices + 1, -1)
    low[0] = high[0] = layers
    for k in range(1, stages + 1):
        new_low, new_high = np.full(devices + 1, layers + 1), np.full(devices + 1, -1)
        for rest in range(devices):
            if high[rest] < 0:
                continue
            for r in range(1, min(given.most_replicas, devices - rest) + 1):
                if r > FINE and r % COARSE:
                    continue
                d = rest + r
                after = -1
                start = min(high[rest], layers if k == 1 else highest_cut[rest])
                for i in range(start - 1, lowest_cut[d] - 1, -1):
                    # The nearest next stage: more layers take longer and need more memory.
                    j = i + 1
                    if (
                        replicas[rest, j] > 0
                        and stage[rest, j] == k - 1
                        and crossing_seconds(table, j, r, batches, border[rest]) <= limit
                    ):
                        after = j
                    if after < 0:
                        if i < low[rest]:
                            break
                        continue
                    stays = fixed[after] - fixed[i]
                    if i < low[rest] and stays + (work[after] - work[i] - stays) / r > limit * (1 + 1e-9):
                        break
                    if i >= highest_cut[d] or replicas[d, i] > 0:
                        continue
                    if crossing_seconds(table, i, r, batches, border[d]) > limit:
                        continue
                    for mode in range(2):
                        if (
                            given.modes[mode]
                            and stage_seconds(table, i, after, r, mode == 1, batches, ring[d, r]) <= limit
                            and stage_memory(table, i, after, r, mode == 1, copies[k], in_flight[k])
                            <= memory[d, r]
                        ):
                            replicas[d, i] = r
                            after_it[d, i] = after
                            again[d, i] = mode
                            stage[d, i] = k
                            new_low[d], new_high[d] = min(new_low[d], i), max(new_high[d], i)
                            break
        low, high = new_low, new_high
        for d in range(devices if given.all_devices else k, devices + 1):
            if replicas[d, 0] > 0:
                return k, d
    return -1, -1


@njit(cache=True)
def crossing_seconds(table: np.ndarray, layer: int, replicas: int, batches: int, wire: np.ndarray) -> float:
    """Seconds per period of the messages of one replica across the border before ``layer``."""
    if layer == 0 or layer == table.shape[1] - 1:
        return 0.0
    return batches * (wire[0] + wire[1] * table[5, layer] / replicas)
