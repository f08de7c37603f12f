"""The best order of RS and AG for given buckets, compiled by numba: Carlier's branch and bound.

One link is one machine. Job ``b`` is the RS of bucket b, job ``n + b`` its AG. A job has a **head** (it
cannot start earlier), a cost, and a **tail** (what must follow it before the iteration ends). Minimising
the latest ``end + tail`` is the problem ``1 | r_j, q_j, prec | Cmax``. Schrage's rule starts, whenever the
link is free, the ready job with the longest tail. Where that is not optimal, one job went ahead of more
urgent ones that became ready while it ran; in the best order it stands before all of them or after all of
them, so its tail or its head is raised and the rule is asked again.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

from scheduler.simulate.step_kernel import Load, Step, step_period


class Jobs(NamedTuple):
    head: np.ndarray
    tail: np.ndarray
    cost: np.ndarray
    delay: np.ndarray
    """Seconds between the RS and the AG of each bucket."""


@njit(cache=True)
def best_order(step: Step, load: Load, nodes: int, enough: float) -> tuple[np.ndarray, float, int]:
    """The best order found in ``nodes`` Schrage schedules, its period, and the schedules used.

    It is optimal if fewer than ``nodes`` were used and updates take no time. A period of ``enough`` ends
    the search.
    """
    jobs = _jobs(step, load)
    size = len(jobs.cost)
    order = np.empty(size, np.int64)
    start, end = np.empty(size), np.empty(size)
    if step.gathers_late:
        # Each RS as it becomes ready, which ends them as early as can be at any speed; then the most urgent
        # AGs.
        for bucket in range(size // 2):
            jobs.tail[bucket] = -jobs.head[bucket]
            jobs.head[size // 2 + bucket] = np.inf
        _schrage(jobs, order, start, end)
        return order, step_period(step, load, order), 1
    heads, tails, bounds = np.empty((nodes + 2, size)), np.empty((nodes + 2, size)), np.zeros(nodes + 2)
    _copy(jobs.head, heads, 0)
    _copy(jobs.tail, tails, 0)
    best, chosen = np.inf, order.copy()
    open_, used = 1, 0
    while open_ > 0 and used < nodes:
        open_ -= 1
        if bounds[open_] >= best:
            continue
        for job in range(size):
            jobs.head[job], jobs.tail[job] = heads[open_, job], tails[open_, job]
        _schrage(jobs, order, start, end)
        used += 1
        period = step_period(step, load, order)
        if period < best:
            best, chosen = period, order.copy()
            if best <= enough:
                break
        last, first = _critical(jobs, order, start, end)
        if first == last:
            continue
        job, due, work, earliest = order[first], jobs.tail[order[last]], 0.0, np.inf
        for position in range(first + 1, last + 1):
            work += jobs.cost[order[position]]
            earliest = min(earliest, jobs.head[order[position]])
        with_job = min(earliest, jobs.head[job]) + jobs.cost[job] + work + jobs.tail[job]
        bound = max(bounds[open_], earliest + work + due, with_job)
        if bound >= best:
            continue
        for _ in range(2):
            _copy(jobs.head, heads, open_)
            _copy(jobs.tail, tails, open_)
            bounds[open_] = bound
            open_ += 1
        # The upper one is looked at first: mostly a job that blocks urgent ones had better wait.
        _raise_tail(jobs, tails[open_ - 2], job, work + due)
        _raise_head(jobs, heads[open_ - 1], job, earliest + work)
    return chosen, best, used


@njit(cache=True)
def _copy(values: np.ndarray, rows: np.ndarray, row: int) -> None:
    # Assigning slices would say the same and take numba much longer to compile.
    for at in range(len(values)):
        rows[row, at] = values[at]


@njit(cache=True)
def _schrage(jobs: Jobs, order: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Fills ``order`` with jobs, ``start`` and ``end`` with times, by position."""
    count = len(jobs.delay)
    coming = [(jobs.head[b], b) for b in range(count)]
    heapq.heapify(coming)
    waiting = [(0.0, 0) for _ in range(0)]
    now = 0.0
    for position in range(2 * count):
        if len(waiting) == 0:
            now = max(now, coming[0][0])
        while len(coming) > 0 and coming[0][0] <= now:
            job = heapq.heappop(coming)[1]
            heapq.heappush(waiting, (-jobs.tail[job], job))
        job = heapq.heappop(waiting)[1]
        order[position] = job
        start[position] = now
        now += jobs.cost[job]
        end[position] = now
        if job < count:
            heapq.heappush(coming, (max(jobs.head[job + count], now + jobs.delay[job]), job + count))


@njit(cache=True)
def _jobs(step: Step, load: Load) -> Jobs:
    count, layers = len(load.layer), len(step.forward)
    own = np.zeros(layers + 1)  # updates that run before the forward of each layer
    delay = np.zeros(count)
    for b in range(count):
        if step.update_in_compute:
            own[load.layer[b]] += load.update[b]
        else:
            delay[b] = load.update[b]
    after = np.zeros(layers + 1)  # compute from the forward of each layer on
    for layer in range(layers - 1, -1, -1):
        after[layer] = step.forward[layer] + own[layer + 1] + after[layer + 1]
    head, tail, costs = np.empty(2 * count), np.empty(2 * count), np.empty(2 * count)
    for b in range(count):
        layer, cost = load.layer[b], load.cost[b]
        costs[b] = costs[b + count] = cost
        tail[b + count] = after[layer] + (load.update[b] if step.update_in_compute else 0.0)
        tail[b] = tail[b + count] + cost + delay[b]
        head[b] = load.ready[b]
        head[b + count] = max(head[b] + cost, step.update_from) + delay[b]
    return Jobs(head, tail, costs, delay)


@njit(cache=True)
def _critical(jobs: Jobs, order: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    """Where the longest path ends, and the last job before it, with no pause between, whose tail is shorter.

    Twice the same position if there is no such job: then the order is optimal.
    """
    last, longest = 0, -1.0
    for position in range(len(order)):
        if end[position] + jobs.tail[order[position]] >= longest:
            last, longest = position, end[position] + jobs.tail[order[position]]
    position = last
    while position > 0 and start[position] == end[position - 1]:
        position -= 1
        if jobs.tail[order[position]] < jobs.tail[order[last]]:
            return last, position
    return last, last


@njit(cache=True)
def _raise_tail(jobs: Jobs, tail: np.ndarray, job: int, least: float) -> None:
    """``job`` must come before what takes ``least`` from its end on; so must the RS of an AG."""
    count = len(jobs.delay)
    tail[job] = max(tail[job], least)
    if job >= count:
        tail[job - count] = max(tail[job - count], tail[job] + jobs.cost[job] + jobs.delay[job - count])


@njit(cache=True)
def _raise_head(jobs: Jobs, head: np.ndarray, job: int, least: float) -> None:
    """``job`` cannot start before ``least``; nor can the AG of an RS before that has ended."""
    count = len(jobs.delay)
    head[job] = max(head[job], least)
    if job < count:
        head[job + count] = max(head[job + count], head[job] + jobs.cost[job] + jobs.delay[job])
