"""Wait-free backpropagation: a bucket is all-reduced once the backward has filled it, as in DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.buckets import Bucket
from scheduler.link import Link
from scheduler.problem import FUSED, MIB, Problem, all_reduces, backward_order
from scheduler.profile import Profile
from scheduler.program import Program


def wfbp(
    profile: Profile,
    link: Link,
    *,
    buckets: Sequence[Bucket] | None = None,
    bucket_bytes: float | None = None,
    **step: Any,
) -> Program:
    """Buckets of 25 MiB, the first of 1 MiB, unless told otherwise."""
    problem = Problem(profile, link, **step)
    problem.refuse_sharded("wfbp")
    if buckets is None:
        limit = FUSED if bucket_bytes is None else bucket_bytes
        chosen = problem.fuse(limit, first=min(limit, MIB))
    else:
        chosen = problem.checked(buckets)
    return problem.program("wfbp", chosen, all_reduces(backward_order(chosen)))
