"""No overlap: everything travels between the backward and the forward. The others are measured against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem, all_gathers, backward_order, reduce_scatters


def sequential(
    profile: Profile,
    link: Link,
    *,
    buckets: Sequence[Bucket] | None = None,
    bucket_bytes: float | None = None,
    **step: Any,
) -> Program:
    """One bucket (for each group) unless told otherwise.

    A program says no more about time than the order on the link. So the bucket that is complete last is
    reduced first, which holds up the others until the backward has ended; and gathered last, which holds up
    the forward.
    """
    problem = Problem(profile, link, **step)
    (chosen,) = problem.candidates(buckets, bucket_bytes, [math.inf])
    last_first = backward_order(chosen)[::-1]
    return problem.program("sequential", chosen, reduce_scatters(last_first) + all_gathers(last_first[::-1]))
