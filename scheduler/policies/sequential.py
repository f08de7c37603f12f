"""No overlap: everything travels between the backward and the forward. The others are measured against it."""

from __future__ import annotations

import math

from scheduler.ir.actions import Kind
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem, backward_order, collectives


def sequential(problem: Problem) -> Program:
    """One bucket (for each group) unless told otherwise.

    A program states only the order on the link. To keep communication out of the backward, the bucket that
    the backward completes last is reduced first: the others wait behind it. It is gathered last, so the
    forward waits for all of them.
    """
    (chosen,) = problem.candidates([math.inf])
    last_first = backward_order(chosen)[::-1]
    order = collectives(Kind.RS, last_first) + collectives(Kind.AG, last_first[::-1])
    return problem.program("sequential", chosen, order)
