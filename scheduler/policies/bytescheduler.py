"""ByteScheduler (Peng et al.; SOSP 2019): all-reduces in parts, those of the first layers first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket, fuse_by_bytes
from scheduler.ir.program import Program
from scheduler.policies.problem import MIB, Problem

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
