"""The fast kernel that searches call thousands of times: one data-parallel iteration in one pass, compiled by
numba. A test holds it equal to the event simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Step(NamedTuple):
    """What does not depend on the buckets: seconds of each layer's forward and of the whole backward, and
    rules for updates (see ``StepModel``).
    """

    forward: np.ndarray
    backward: float
    update_in_compute: bool
    update_from: float
    gathers_late: bool


class Load(NamedTuple):
    """The buckets: when the backward has completed each, the layer whose forward needs it first; seconds of a
    collective, of the update.
    """

    ready: np.ndarray
    layer: np.ndarray
    cost: np.ndarray
    update: np.ndarray


@njit(cache=True)
def step_period(step: Step, load: Load, order: np.ndarray) -> float:
    """Return the seconds of one data-parallel iteration.

    ``order`` holds ``b`` for RS of bucket b, ``n + b`` for its AG and ``2 * n + b`` for its AR.
    """
    buckets, layers = len(load.layer), len(step.forward)
    gathered = np.zeros(buckets)
    usable = np.zeros(buckets)
    # Buckets first due at each layer, a chained list in the order of their AGs.
    head = np.full(layers, -1, np.int64)
    tail = np.full(layers, -1, np.int64)
    following = np.full(buckets, -1, np.int64)
    link, updater = 0.0, step.update_from
    for operation in order:
        bucket = operation % buckets
        if operation < buckets:
            link = max(link, load.ready[bucket]) + load.cost[bucket]
            usable[bucket] = link
            if not step.update_in_compute:
                updater = max(updater, link) + load.update[bucket]
                usable[bucket] = updater
            continue
        if operation < 2 * buckets:
            link = max(link, usable[bucket]) + load.cost[bucket]
        else:
            link = max(link, load.ready[bucket]) + 2.0 * load.cost[bucket]
        gathered[bucket] = link
        layer = load.layer[bucket]
        if head[layer] < 0:
            head[layer] = bucket
        else:
            following[tail[layer]] = bucket
        tail[layer] = bucket
    now = step.backward
    for layer in range(layers):
        bucket = head[layer]
        while bucket >= 0:
            now = max(now, gathered[bucket])
            if step.update_in_compute:
                now += load.update[bucket]
            bucket = following[bucket]
        now += step.forward[layer]
    return now
