"""DeAR (Zhang et al.; ICDCS 2023): reduce-scatter under the backward, all-gather under the next forward."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.buckets import Bucket
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem, backward_order, collectives


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
