"""Orders judged by their period alone, compiled by numba: for updates, which branch and bound does not model.

An update between RS and AG delays the AG by a time that depends on the updates before it. ``exchange``
moves jobs one at a time; ``every_order`` tries all orders of a few buckets.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from scheduler.simulate.step_kernel import Load, Step, step_period


@njit(cache=True)
def is_order(order: np.ndarray, gathers_late: bool) -> bool:
    """Whether every AG stands after its RS (``gathers_late``: after every RS)."""
    count = len(order) // 2
    reduced = np.zeros(count, np.bool_)
    seen = 0
    for job in order:
        if job < count:
            reduced[job] = True
            seen += 1
        elif not reduced[job - count] or (gathers_late and seen < count):
            return False
    return True


@njit(cache=True)
def exchange(step: Step, load: Load, order: np.ndarray, tries: int) -> tuple[np.ndarray, float]:
    """Moves one job at a time to another place as long as that helps; computes ``tries`` periods at most."""
    best, trial = order.copy(), order.copy()
    period = step_period(step, load, best)
    improved = True
    while improved and tries > 0:
        improved = False
        for source in range(len(best)):
            for target in range(len(best)):
                trial[:] = best
                low, high = min(source, target), max(source, target)
                if source < target:
                    trial[low:high] = best[low + 1 : high + 1]
                else:
                    trial[low + 1 : high + 1] = best[low:high]
                trial[target] = best[source]
                if source == target or tries <= 0 or not is_order(trial, step.gathers_late):
                    continue
                tries -= 1
                other = step_period(step, load, trial)
                if other < period:
                    best[:], period = trial, other
                    improved = True
    return best, period


@njit(cache=True)
def every_order(step: Step, load: Load) -> tuple[np.ndarray, float]:
    """The best of all orders: for n buckets there are ``(2n)! / 2**n``."""
    count = len(load.layer)
    order, best, period = np.zeros(2 * count, np.int64), np.zeros(2 * count, np.int64), np.inf
    placed = np.zeros(2 * count, np.bool_)
    order[0] = -1
    position = 0  # depth-first: the job at `position` is replaced by the next one that may stand there
    while position >= 0:
        job = order[position]
        if job >= 0:
            placed[job] = False
        job += 1
        while job < 2 * count and (placed[job] or not _may_follow(placed, job, step.gathers_late)):
            job += 1
        if job == 2 * count:
            position -= 1
            continue
        order[position] = job
        placed[job] = True
        position += 1
        if position < 2 * count:
            order[position] = -1
            continue
        other = step_period(step, load, order)
        if other < period:
            best[:], period = order, other
        position -= 1
    return best, period


@njit(cache=True)
def _may_follow(placed: np.ndarray, job: int, gathers_late: bool) -> bool:
    count = len(placed) // 2
    if job < count:
        return True
    return bool(placed[:count].all()) if gathers_late else bool(placed[job - count])
