"""The published policies, and the one without overlap that all are measured against.

DeAR and PipeDAP decouple RS from AG; WFBP, MG-WFBP and ByteScheduler all-reduce.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket, Piece, fuse_by_bytes, in_backward_order
from scheduler.ir.program import Program
from scheduler.policies.problem import FUSED, MIB, Problem, backward_order, collectives

# -- no overlap: everything travels between the backward and the forward -------------------------------------


def sequential(problem: Problem) -> Program:
    """One bucket (for each group) unless told otherwise.

    A program states only the order on the link. To keep communication out of the backward, the bucket that
    the backward completes last is reduced first: the others wait for it. It is gathered last, so the
    forward waits for all of them.
    """
    (chosen,) = problem.candidates([math.inf])
    last_first = backward_order(chosen)[::-1]
    order = collectives(Kind.RS, last_first) + collectives(Kind.AG, last_first[::-1])
    return problem.program("sequential", chosen, order)


# -- wait-free backpropagation: a bucket is all-reduced once the backward has filled it, as in DDP -----------


def wfbp(problem: Problem) -> Program:
    """Buckets of 25 MiB, the first of 1 MiB, unless told otherwise."""
    if problem.buckets is None:
        limit = FUSED if problem.bucket_bytes is None else problem.bucket_bytes
        chosen = problem.fuse(limit, first=min(limit, MIB))
    else:
        (chosen,) = problem.candidates()
    return problem.program("wfbp", chosen, collectives(Kind.AR, backward_order(chosen)))


# -- MG-WFBP (Shi, Chu, Li; INFOCOM 2019): gradients are merged where waiting costs less than a start-up -----


def mgwfbp(problem: Problem) -> Program:
    """Chooses its buckets by the paper's condition unless told otherwise."""
    chosen = problem.candidates()[0] if problem.has_buckets else _merge(problem)
    return problem.program("mgwfbp", chosen, collectives(Kind.AR, backward_order(chosen)))


def _merge(problem: Problem) -> tuple[Bucket, ...]:
    """Walks the layers in backward order, with the all-reduces of all closed buckets under way.

    The open bucket could start at ``start``. If the next layer's gradient is ready less than one start-up
    later, starting without it would cost more than it gains, so it joins.
    """
    profile, link = problem.profile, problem.link
    startup = link.cost(Kind.AR, 0)
    ready = problem.model(()).ready
    closed: list[Bucket] = []
    link_free = 0.0
    pieces: dict[int, list[Piece]] = {}
    for layer, successor in _in_groups(problem):
        group = problem.groups[layer]
        open_ = pieces.setdefault(group, [])
        open_.append(Piece(layer, 0, profile.sizes[layer]))
        start = max(link_free, ready[layer])
        if successor is not None and ready[successor] - start < startup:
            continue
        closed.append(Bucket(tuple(pieces.pop(group)), group))
        link_free = start + link.cost(Kind.AR, closed[-1].bytes)
    return in_backward_order(closed)


def _in_groups(problem: Problem) -> list[tuple[int, int | None]]:
    """Each layer with bytes in backward order, and the one it may be merged with: the next of its group."""
    rows: list[tuple[int, int | None]] = []
    below: dict[int, int] = {}
    for layer, size in enumerate(problem.profile.sizes):
        if size:
            rows.append((layer, below.get(problem.groups[layer])))
            below[problem.groups[layer]] = layer
    return rows[::-1]


# -- ByteScheduler (Peng et al.; SOSP 2019): all-reduces in parts, those of the first layers first -----------

PARTS = (0.5 * MIB, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
"""Partition sizes to choose from; the authors tune theirs for each model and network."""


def bytescheduler(problem: Problem) -> Program:
    """Every layer by itself, in parts of ``bucket_bytes``: the best of ``PARTS`` unless told otherwise."""
    if problem.buckets is not None:
        choices = problem.candidates()
    else:
        parts = PARTS if problem.bucket_bytes is None else [problem.bucket_bytes]
        choices = [
            fuse_by_bytes(problem.profile.sizes, 1, part=part, groups=problem.groups) for part in parts
        ]
    return problem.fastest(
        problem.program("bytescheduler", chosen, _by_priority(problem, chosen))
        for chosen in dict.fromkeys(choices)
    )


def _by_priority(problem: Problem, buckets: Sequence[Bucket]) -> list[Action]:
    """When the link is free, the ready bucket of the lowest layer; what has started is not interrupted."""
    ready = problem.model(buckets).ready
    coming = sorted(range(len(buckets)), key=lambda b: (ready[buckets[b].ready_layer], b), reverse=True)
    waiting: list[tuple[int, int]] = []
    order: list[Action] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[buckets[coming[-1]].ready_layer])
        while coming and ready[buckets[coming[-1]].ready_layer] <= now:
            bucket = coming.pop()
            heapq.heappush(waiting, (buckets[bucket].ready_layer, bucket))
        _, bucket = heapq.heappop(waiting)
        order.append(Action(Kind.AR, bucket))
        now += problem.link.cost(Kind.AR, buckets[bucket].bytes)
    return order


# -- DeAR (Zhang et al.; ICDCS 2023): RS under the backward, AG under the next forward -----------------------


def dear(problem: Problem) -> Program:
    """Uses the best bucket size of ``LADDER`` unless ``buckets`` or ``bucket_bytes`` are given: the authors
    tune theirs too.
    """
    return problem.fastest(
        problem.program("dear", chosen, decoupled(chosen)) for chosen in problem.candidates()
    )


def decoupled(buckets: Sequence[Bucket]) -> list[Action]:
    """Every RS in the order of the backward, then every AG in the order of the forward."""
    forward = sorted(range(len(buckets)), key=lambda b: buckets[b].ready_layer)
    return collectives(Kind.RS, backward_order(buckets)) + collectives(Kind.AG, forward)


# -- PipeDAP -------------------------------------------------------------------------------------------------

# DeAR's decoupled order, with all-gathers moved into the backward where there is slack for them.
#
# The slack of an all-gather, as published, is the idle time of the link between its reduce-scatter and the
# last one, plus the time for which the forward waits, from its bucket on, for all-gathers. Moving an AG
# delays the reduce-scatters by what does not fit into the idle time, and saves at most that wait; so an AG
# shorter than its slack is moved. The buckets are visited in forward order, and all times are computed anew
# after each move.


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
        """Moves this bucket's AG after its RS, or after the next one where the two run back to back."""
        place = number if self.idle[number] > self.startup else number + 1
        wait = self.late[0] - self.late[number + 1]
        if self.idle[place:].sum() + wait <= self.cost[number]:
            return
        self.moved_after[place].append(number)
        self.busy[place] += self.cost[number]
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
