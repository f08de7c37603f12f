"""The loops of simulations, compiled by numba. Imported only by functions that are about to run them."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from scheduler.simulate.task_graph import Arrays

# -- the event loop of the simulator -------------------------------------------------------------------------


@njit(cache=True)
def run_events(
    iterations: int, graph: Arrays, factor: np.ndarray, slowdown: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Start and end of every task in every iteration, and how many have ended.

    ``factor[k, r]`` multiplies what rank r computes in iteration k. While a link of a rank is busy its
    compute runs at ``1 / (1 + slowdown)`` of its speed. Task ``i`` of iteration ``k`` is number ``k * tasks +
    i`` here.
    """
    duration, resource, rank = graph.duration, graph.resource, graph.rank
    row, successor, lag = graph.row, graph.successor, graph.lag
    tasks, ranks = len(duration), factor.shape[1]
    start = np.full(iterations * tasks, np.nan)
    end = np.full(iterations * tasks, np.nan)
    waiting = np.zeros(iterations * tasks, np.int64)
    for edge in range(len(successor)):
        for k in range(lag[edge], iterations):
            waiting[k * tasks + successor[edge]] += 1

    busy = np.zeros(ranks, np.int64)  # links in use, by rank
    # Seconds of work left at full speed, for tasks whose speed may change.
    left = np.zeros(iterations * tasks)
    since = np.zeros(iterations * tasks)  # when `left` was right
    running = np.full(ranks, -1, np.int64)  # the compute task of each rank
    queue = [(0.0, np.int64(-1))]
    queue.pop()
    ready = [np.int64(-1)]
    ready.pop()
    for number in range(iterations * tasks):
        if waiting[number] == 0:
            ready.append(number)

    done = 0
    now = 0.0
    while True:
        while len(ready) > 0:
            number = ready.pop()
            task = number % tasks
            start[number] = now
            work = duration[task]
            if resource[task] == 1:
                work *= factor[number // tasks, rank[task]]
                left[number] = work
                since[number] = now
                running[rank[task]] = number
                if busy[rank[task]] > 0:
                    work *= 1.0 + slowdown
            end[number] = now + work
            heapq.heappush(queue, (end[number], number))
            if resource[task] == 2 and slowdown > 0.0:
                _use_link(1, rank[task], now, slowdown, busy, running, left, since, end, queue)
        if len(queue) == 0:
            return start.reshape(iterations, tasks), end.reshape(iterations, tasks), done
        now, number = heapq.heappop(queue)
        if end[number] != now or waiting[number] < 0:
            continue  # its end has moved since this was queued
        waiting[number] = -1
        done += 1
        task = number % tasks
        if resource[task] == 1 and running[rank[task]] == number:
            running[rank[task]] = -1
        if resource[task] == 2 and slowdown > 0.0:
            _use_link(-1, rank[task], now, slowdown, busy, running, left, since, end, queue)
        for edge in range(row[task], row[task + 1]):
            after = number + lag[edge] * tasks + successor[edge] - task
            if after < iterations * tasks:
                waiting[after] -= 1
                if waiting[after] == 0:
                    ready.append(after)


@njit(cache=True)
def _use_link(
    change: int,
    rank: int,
    now: float,
    slowdown: float,
    busy: np.ndarray,
    running: np.ndarray,
    left: np.ndarray,
    since: np.ndarray,
    end: np.ndarray,
    queue: list,
) -> None:
    """A link of ``rank`` (-1: of every rank) becomes busy or idle: compute under way changes its speed."""
    first, last = (0, len(busy)) if rank < 0 else (rank, rank + 1)
    for r in range(first, last):
        was_slow = busy[r] > 0
        busy[r] += change
        slow = busy[r] > 0
        number = running[r]
        if number < 0 or slow == was_slow:
            continue
        left[number] -= (now - since[number]) / (1.0 + slowdown if was_slow else 1.0)
        since[number] = now
        end[number] = now + max(left[number], 0.0) * (1.0 + slowdown if slow else 1.0)
        heapq.heappush(queue, (end[number], number))


# -- one data-parallel iteration in one pass -----------------------------------------------------------------

# Searches call this kernel thousands of times. A test holds it equal to the event simulator.


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
    collective on the link, of the update, and of a collective on the link inside the host (0: it uses none).
    """

    ready: np.ndarray
    layer: np.ndarray
    cost: np.ndarray
    update: np.ndarray
    inside: np.ndarray


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
    link, updater, host = 0.0, step.update_from, 0.0
    early = -1  # the operation whose part inside the host has been done ahead of its turn
    summed = 0.0
    for place, operation in enumerate(order):
        bucket = operation % buckets
        gathers, reduces = operation >= buckets, operation < buckets or operation >= 2 * buckets
        start, cost, inside = load.ready[bucket], load.cost[bucket], load.inside[bucket]
        if reduces and inside > 0.0:
            if early != operation:
                host = max(host, start) + inside
                summed = host
            start = summed
        if not gathers:
            link = max(link, start) + cost
            usable[bucket] = link
            if not step.update_in_compute:
                updater = max(updater, link) + load.update[bucket]
                usable[bucket] = updater
            continue
        if not reduces:
            link = max(link, usable[bucket]) + cost
        else:
            link = max(link, start) + 2.0 * cost
        gathered[bucket] = link
        if inside > 0.0:
            # The host sums the next bucket while this one is on the link (see ``lowering.inside_order``).
            after = order[place + 1] if place + 1 < len(order) else buckets
            next_bucket = after % buckets
            if after // buckets != 1 and load.inside[next_bucket] > 0.0:
                host = max(host, load.ready[next_bucket]) + load.inside[next_bucket]
                early, summed = after, host
            host = max(host, link) + inside
            gathered[bucket] = host
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
