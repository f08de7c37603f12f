"""DeAR (Zhang et al.; ICDCS 2023): reduce-scatter under the backward, all-gather under the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.ir.actions import Action
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem, all_gathers, backward_order, reduce_scatters


def dear(
    profile: Profile,
    link: Link,
    *,
    buckets: Sequence[Bucket] | None = None,
    bucket_bytes: float | None = None,
    **step: Any,
) -> Program:
    """Uses the best bucket size of ``LADDER`` unless ``buckets`` or ``bucket_bytes`` are given: the authors
    tune theirs too.
    """
    problem = Problem(profile, link, **step)
    return problem.fastest(
        problem.program("dear", chosen, decoupled(chosen))
        for chosen in problem.candidates(buckets, bucket_bytes)
    )


def decoupled(buckets: Sequence[Bucket]) -> list[Action]:
    """Every RS in the order of the backward, then every AG in the order of the forward."""
    forward = sorted(range(len(buckets)), key=lambda b: buckets[b].due_layer)
    return reduce_scatters(backward_order(buckets)) + all_gathers(forward)
