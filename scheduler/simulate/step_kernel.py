"""The fast kernel that searches call thousands of times: one data-parallel iteration in one pass, compiled by
numba. A test holds it equal to the event simulator.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def step_period(
    forward: np.ndarray,
    backward_end: np.ndarray,
    ready: np.ndarray,
    due: np.ndarray,
    cost: np.ndarray,
    update: np.ndarray,
    order: np.ndarray,
    update_in_compute: bool,
    update_from: float,
) -> float:
    """Seconds of one data-parallel iteration; ``StepModel`` prepares the arrays.

    ``order`` holds ``b`` for RS of bucket b, ``n + b`` for its AG and ``2 * n + b`` for its AR.
    """
    buckets, layers = len(ready), len(forward)
    gathered = np.zeros(buckets)
    usable = np.zeros(buckets)
    # Buckets first due at each layer, a chained list in the order of their AGs.
    head = np.full(layers, -1, np.int64)
    tail = np.full(layers, -1, np.int64)
    following = np.full(buckets, -1, np.int64)
    link, updater = 0.0, update_from
    for operation in order:
        bucket = operation % buckets
        if operation < buckets:
            link = max(link, backward_end[ready[bucket]]) + cost[bucket]
            usable[bucket] = link
            if not update_in_compute:
                updater = max(updater, link) + update[bucket]
                usable[bucket] = updater
            continue
        if operation < 2 * buckets:
            link = max(link, usable[bucket]) + cost[bucket]
        else:
            link = max(link, backward_end[ready[bucket]]) + 2.0 * cost[bucket]
        gathered[bucket] = link
        layer = due[bucket]
        if head[layer] < 0:
            head[layer] = bucket
        else:
            following[tail[layer]] = bucket
        tail[layer] = bucket
    now = backward_end[0]
    for layer in range(layers):
        bucket = head[layer]
        while bucket >= 0:
            now = max(now, gathered[bucket])
            if update_in_compute:
                now += update[bucket]
            bucket = following[bucket]
        now += forward[layer]
    return now
