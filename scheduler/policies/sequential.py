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

    A program states only the order on the link. To keep communication out of the backward, the bucket that
    the backward completes last is reduced first: the others wait behind it. It is gathered last, so the
    forward waits for all of them.
    """
    problem = Problem(profile, link, **step)
    (chosen,) = problem.candidates(buckets, bucket_bytes, [math.inf])
    last_first = backward_order(chosen)[::-1]
    return problem.program("sequential", chosen, reduce_scatters(last_first) + all_gathers(last_first[::-1]))
