"""Traffic classes on one link: halos before activations before gradients.

    urgent_first(graph)     # the order of a step on a link that always takes the most urgent message

A message under way is never interrupted, so what must not wait long needs short messages in front of it:
``largest_chunk`` says how long a gradient's may be.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace

import numpy as np

from scheduler.ir.actions import COLLECTIVE, HALOS, TRANSFER, Action
from scheduler.ir.link import Link
from scheduler.simulate.task_graph import LINK, TaskGraph

_ITERATIONS = 12


def traffic_class(action: Action) -> int:
    """How urgent a message is: 0 for a halo, 1 for an activation, 2 for a gradient."""
    for urgency, kinds in enumerate((HALOS, TRANSFER, COLLECTIVE)):
        if action.kind in kinds:
            return urgency
    raise ValueError(f"{action} is no message: halos, activations and gradients are")


def largest_chunk(link: Link, longest_wait: float) -> float:
    """Bytes of the largest RS or AG that holds a halo up for at most so many seconds."""
    if longest_wait <= link.alpha:
        raise ValueError(
            f"no gradient is short enough for a halo that may wait {longest_wait} s: starting a message alone"
            f" takes {link.alpha} s; allow more"
        )
    return (longest_wait - link.alpha) / link.beta if link.beta else float("inf")


def urgent_first(graph: TaskGraph) -> tuple[Action, ...]:
    """What a link does in one step of the steady state if it always takes the most urgent message that is
    ready, then the oldest, then the one that stands first in the graph. Those of an earlier step are shifted.

    ``graph`` ties the messages to what they wait for and not to each other.
    """
    started, begins = _run(graph, _ITERATIONS)
    messages = int((graph.resource == LINK).sum())
    for step in range(_ITERATIONS - 2, 0, -1):
        found = [item for item in started if begins[step] <= item[0] < begins[step + 1]]
        if len(found) == messages and max(Counter(task for _, task, _ in found).values(), default=1) == 1:
            return tuple(
                replace(graph.tasks[task].action, shift=iteration - step) for _, task, iteration in found
            )
    raise ValueError(
        f"the order of {messages} messages does not settle within {_ITERATIONS} steps; this is a fault of the"
        " scheduler, please report the profile"
    )


def _run(graph: TaskGraph, iterations: int) -> tuple[list[tuple[float, int, int]], list[float]]:
    """Starts of messages (time, task, iteration), and when the computing before each iteration ended."""
    tasks = len(graph.tasks)
    waiting = np.zeros((iterations, tasks), np.int64)
    for after, lag in zip(graph.successor, graph.lag, strict=True):
        waiting[lag:, after] += 1
    urgency = [traffic_class(t.action) if graph.resource[i] == LINK else 0 for i, t in enumerate(graph.tasks)]
    queue: list[tuple[float, int, int]] = []  # ends
    free: list[tuple[int, int, int]] = []  # messages that are ready
    started: list[tuple[float, int, int]] = []
    begins = [0.0] * (iterations + 1)
    ready = [(k, task) for k in range(iterations) for task in np.flatnonzero(waiting[k] == 0).tolist()]
    now, busy = 0.0, False
    while True:
        for k, task in ready:
            if graph.resource[task] == LINK:
                heapq.heappush(free, (urgency[task], k, task))
            else:
                heapq.heappush(queue, (now + graph.duration[task], k, task))
        # What ends at this very moment may free something more urgent.
        if free and not busy and (not queue or queue[0][0] > now):
            _, k, task = heapq.heappop(free)
            started.append((now, task, k))
            heapq.heappush(queue, (now + graph.duration[task], k, task))
            busy = True
        if not queue:
            return started, begins
        now, k, task = heapq.heappop(queue)
        if graph.resource[task] == LINK:
            busy = False
        else:
            begins[k + 1] = max(begins[k + 1], now)
        ready = []
        for edge in range(graph.row[task], graph.row[task + 1]):
            after, later = int(graph.successor[edge]), k + int(graph.lag[edge])
            if later < iterations:
                waiting[later, after] -= 1
                if waiting[later, after] == 0:
                    ready.append((later, after))
