"""PipeDAP: DeAR's decoupled order, with all-gathers moved into the backward where there is slack for them.

The slack of an all-gather, as published, is the idle time of the link between its reduce-scatter and the
last one, plus the time for which the forward waits, from its bucket on, for all-gathers. Moving an AG
delays the reduce-scatters by what does not fit into the idle time, and saves at most that wait; so an AG
shorter than its slack is moved. The buckets are visited in forward order, and all times are computed anew
after each move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket
from scheduler.ir.program import Program
from scheduler.policies.dear import decoupled
from scheduler.policies.problem import Problem, backward_order


def pipedap(problem: Problem) -> Program:
    """Uses the best bucket size of ``LADDER`` unless ``buckets`` or ``bucket_bytes`` are given."""
    return problem.fastest(
        problem.program("pipedap", chosen, _order(problem, chosen)) for chosen in problem.candidates()
    )


def _order(problem: Problem, buckets: Sequence[Bucket]) -> list[Action]:
    if problem.gathers_late or len(buckets) < 2:
        return decoupled(buckets)  # no AG may run in the backward, or there is none to move
    slack = _Slack(problem, buckets)
    for number in range(len(buckets) - 2, -1, -1):  # the bucket of the lowest layers comes last and stays
        slack.consider(number)
    return slack.order()


class _Slack:
    """Times of DeAR's order as AGs are moved; the buckets in the order in which the backward fills them."""

    def __init__(self, problem: Problem, buckets: Sequence[Bucket]) -> None:
        self.names = backward_order(buckets)
        model = problem.model([buckets[name] for name in self.names])
        self.cost, self.startup = model.cost, problem.link.alpha
        self.ready = model.ready[model.layer]
        # The forward reaches bucket i after the forward of all layers below it.
        self.forward_below = (np.cumsum(model.forward) - model.forward)[model.layer]
        self.moved_after: list[list[int]] = [[] for _ in buckets]
        self.busy = model.cost.copy()  # each RS, with the AGs that follow it in the backward
        self.left = model.cost.copy()  # the AGs that are left for the forward
        self.stays = np.ones(len(buckets), bool)
        self._time()

    def _time(self) -> None:
        before = np.cumsum(self.busy) - self.busy
        start = before + np.maximum.accumulate(self.ready - before)
        end = start + self.busy
        self.idle = np.append(start[1:] - end[:-1], 0.0)
        # Forward order from here: when the AGs of each bucket and of those below it have ended, and who
        # waits for that.
        gathered = end[-1] + np.cumsum(self.left[::-1])
        self.late = np.maximum.accumulate(gathered - self.forward_below[::-1])[::-1]

    def consider(self, number: int) -> None:
        """Moves this bucket's AG behind its RS, or behind the next one where the two run back to back."""
        behind = number if self.idle[number] > self.startup else number + 1
        wait = self.late[0] - self.late[number + 1]
        if self.idle[behind:].sum() + wait <= self.cost[number]:
            return
        self.moved_after[behind].append(number)
        self.busy[behind] += self.cost[number]
        self.left[number] = 0.0
        self.stays[number] = False
        self._time()

    def order(self) -> list[Action]:
        actions = []
        for number, moved in enumerate(self.moved_after):
            actions.append(Action(Kind.RS, self.names[number]))
            actions += [Action(Kind.AG, self.names[other]) for other in moved]
        stay = np.flatnonzero(self.stays)[::-1]
        return actions + [Action(Kind.AG, self.names[number]) for number in stay]
