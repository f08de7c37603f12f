"""Wait-free backpropagation: a bucket is all-reduced once the backward has filled it, as in DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import FUSED, MIB, Problem, all_reduces, backward_order


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
