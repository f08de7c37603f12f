"""Wait-free backpropagation: a bucket is all-reduced once the backward has filled it, as in DDP."""

from __future__ import annotations

from scheduler.ir.actions import Kind
from scheduler.ir.program import Program
from scheduler.policies.problem import FUSED, MIB, Problem, backward_order, collectives


def wfbp(problem: Problem) -> Program:
    """Buckets of 25 MiB, the first of 1 MiB, unless told otherwise."""
    if problem.buckets is None:
        limit = FUSED if problem.bucket_bytes is None else problem.bucket_bytes
        chosen = problem.fuse(limit, first=min(limit, MIB))
    else:
        (chosen,) = problem.candidates()
    return problem.program("wfbp", chosen, collectives(Kind.AR, backward_order(chosen)))
