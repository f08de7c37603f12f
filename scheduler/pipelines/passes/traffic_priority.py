"""Order the messages of one link by traffic class: halos first, then activations, then gradients.

A message that has started is never interrupted, so a halo that must not wait long needs short messages in
front of it: ``largest_chunk`` says how long a gradient's may be.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from scheduler.ir.actions import Action
from scheduler.ir.link import Link
from scheduler.simulate.simulator import run
from scheduler.simulate.task_graph import LINK, TaskGraph

_ITERATIONS = 12


def largest_chunk(link: Link, longest_wait: float) -> float:
    """The largest message (bytes) of an RS or AG that delays a halo by at most ``longest_wait`` seconds."""
    if longest_wait <= link.alpha:
        raise ValueError(
            f"no gradient is short enough for a halo that may wait {longest_wait} s: starting a message alone"
            f" takes {link.alpha} s; allow more"
        )
    return (longest_wait - link.alpha) / link.beta if link.beta else float("inf")


def urgent_first(graph: TaskGraph) -> tuple[Action, ...]:
    """The order of messages in one step of the steady state, where they compete for the link by urgency.
    Messages of an earlier step are shifted.
    """
    result = run(graph, _ITERATIONS)
    messages = np.flatnonzero(graph.resource == LINK)
    others = np.flatnonzero(graph.resource != LINK)
    begins = [0.0, *np.maximum.accumulate(result.end[:, others].max(axis=1, initial=0.0))]
    started = sorted(
        (result.start[step, task], result.end[step, task], graph.urgency[task], step, task)
        for step in range(_ITERATIONS)
        for task in messages
    )
    for step in range(_ITERATIONS - 2, 0, -1):
        found = [item for item in started if begins[step] <= item[0] < begins[step + 1]]
        counts = Counter(task for *_, task in found)
        if len(found) == len(messages) and max(counts.values(), default=1) == 1:
            return tuple(
                replace(graph.tasks[task].action, shift=int(iteration) - step)
                for *_, iteration, task in found
            )
    raise ValueError(
        f"the order of {len(messages)} messages does not settle within {_ITERATIONS} steps; this is a fault"
        " of the scheduler, please report the profile"
    )
