"""The dynamic programme of the planner, compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def stage_seconds(
    table: np.ndarray, first: int, last: int, replicas: int, again: bool, batches: int, ring: np.ndarray
) -> float:
    """Seconds per period of layers ``first`` to ``last - 1``: compute, step, and what of RS and AG the last
    backward does not hide.

    ``table`` holds sums up to each layer: forward, backward, bytes, activations, update, (a border's bytes),
    what of the compute stays where a replica has fewer rows, and what traffic takes from it. ``ring`` is
    start-up and seconds per byte of one message.
    """
    forward = table[0, last] - table[0, first]
    backward = table[1, last] - table[1, first]
    size = table[2, last] - table[2, first]
    whole = forward + backward
    fixed = (table[6, last] - table[6, first]) / whole if whole > 0 else 0.0
    part = fixed + (1.0 - fixed) / replicas
    sync = 2.0 * (replicas - 1) * (ring[0] + ring[1] * size / replicas)
    exposed = max(0.0, sync - backward * part)
    update = (table[4, last] - table[4, first]) / replicas
    update += 2.0 * (replicas - 1) / replicas * (table[7, last] - table[7, first])
    work = whole + forward if again else whole
    return batches * work * part + exposed + update


@njit(cache=True)
def stage_memory(
    table: np.ndarray, first: int, last: int, replicas: int, again: bool, copies: float, batches: int
) -> float:
    """Bytes of a stage on one of its devices: ``copies`` of its weights, ``batches`` in flight."""
    weights = copies * (table[2, last] - table[2, first])
    activations = table[3, last] - table[3, first]
    if again:
        return weights + (batches * table[5, first] + activations) / replicas
    return weights + batches * activations / replicas


@njit(cache=True)
def reachable(
    limit: float,
    table: np.ndarray,
    batches: int,
    copies: np.ndarray,
    in_flight: np.ndarray,
    ring: np.ndarray,
    border: np.ndarray,
    memory: np.ndarray,
    modes: np.ndarray,
    choice: np.ndarray,
) -> tuple[int, int]:
    """Number of stages and of devices of a pipeline whose every stage takes at most ``limit`` seconds, or
    (-1, -1).

    ``choice[:, k, d, i]`` becomes (replicas, first layer of the next stage, recompute) of the first of k
    stages on the last d devices that hold layers i and above, 0 replicas where there is no such pipeline.
    ``ring[d, r]`` and ``memory[d, r]`` are those of r devices from d before the end on, ``border[d]`` the
    wire between device d before the end and the one before it. ``copies[k]`` and ``in_flight[k]`` belong to
    the k-th stage from the end. ``modes``: without recomputation, with it.
    """
    stages, devices, layers = choice.shape[1] - 1, choice.shape[2] - 1, choice.shape[3] - 1
    replicas, after_it, again = choice[0], choice[1], choice[2]
    replicas[:] = 0
    replicas[0, 0, layers] = 1
    first = np.full((stages + 1, devices + 1), layers + 1)  # the lowest first layer of a feasible suffix
    first[0, 0] = layers
    work = batches * (table[0] + table[1])
    fixed = batches * table[6]
    # By number of devices behind a cut: the lowest and the highest layer at which the cut can be, because the
    # devices behind it and those before it must each suffice for their layers.
    lowest_cut, highest_cut = np.zeros(devices + 1, np.int64), np.zeros(devices + 1, np.int64)
    for d in range(devices + 1):
        lowest_cut[d] = np.searchsorted(work, work[layers] - limit * d * (1 + 1e-9))
        highest_cut[d] = np.searchsorted(work, limit * (devices - d) * (1 + 1e-9), side="right")
    for k in range(1, stages + 1):
        for d in range(k, devices + 1):
            lowest, highest = lowest_cut[d], highest_cut[d]
            for r in range(1, d - k + 2):
                behind, end = replicas[k - 1, d - r], first[k - 1, d - r]
                if end > layers:
                    continue
                after = -1
                start = layers - 1
                if k > 1:
                    start = min(start, highest_cut[d - r])
                for i in range(max(highest, end - 1), start + 1):
                    if behind[i + 1] > 0 and _crosses(table, i + 1, r, batches, border[d - r], limit):
                        after = i + 1
                        break
                for i in range(min(start, highest - 1), lowest - 1, -1):
                    if behind[i + 1] > 0 and _crosses(table, i + 1, r, batches, border[d - r], limit):
                        after = i + 1
                    if after < 0:
                        if i < end:
                            break
                        continue
                    stays = fixed[after] - fixed[i]
                    if i < end and stays + (work[after] - work[i] - stays) / r > limit * (1 + 1e-9):
                        break  # more layers take longer, and no later start of the next stage is possible
                    if replicas[k, d, i] > 0:
                        continue
                    if not _crosses(table, i, r, batches, border[d], limit):
                        continue
                    for mode in range(2):
                        if (
                            modes[mode]
                            and stage_seconds(table, i, after, r, mode == 1, batches, ring[d, r]) <= limit
                            and stage_memory(table, i, after, r, mode == 1, copies[k], in_flight[k])
                            <= memory[d, r]
                        ):
                            replicas[k, d, i] = r
                            after_it[k, d, i] = after
                            again[k, d, i] = mode
                            first[k, d] = min(first[k, d], i)
                            break
            if replicas[k, d, 0] > 0:
                return k, d
    return -1, -1


@njit(cache=True)
def _crosses(
    table: np.ndarray, layer: int, replicas: int, batches: int, wire: np.ndarray, limit: float
) -> bool:
    """Whether the messages of one replica across the border before ``layer`` fit into the period."""
    if layer == 0 or layer == table.shape[1] - 1:
        return True
    return batches * (wire[0] + wire[1] * table[5, layer] / replicas) <= limit
