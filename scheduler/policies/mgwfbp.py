"""MG-WFBP (Shi, Chu, Li; INFOCOM 2019): gradients are merged where waiting costs less than a start-up."""

from __future__ import annotations

from scheduler.ir.actions import Kind
from scheduler.ir.buckets import Bucket, Piece, in_backward_order
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem, backward_order, collectives


def mgwfbp(problem: Problem) -> Program:
    """Chooses its buckets by the paper's condition unless told otherwise."""
    if problem.has_buckets:
        (chosen,) = problem.candidates()
    else:
        chosen = _merge(problem)
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
