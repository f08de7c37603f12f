"""The start-up bound: the preemptive bound where each RS and each AG pays the link's start-up."""

from __future__ import annotations

import math
from bisect import bisect_right

from scheduler.bounds.preemptive import lower_bound
from scheduler.bounds.window import Window
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


def startup_bound(
    profile: Profile, link: Link, *, gather: str = "gradients", early_step: bool = False, ranks: int = 2
) -> float:
    """As ``lower_bound``, but each RS and each AG pays ``link.alpha``: tighter where that matters.

    Few buckets make bytes wait for each other, many buckets cost start-ups. This bound takes the best number
    of buckets, with collectives that can be preempted at no cost.
    """
    plain = lower_bound(profile, link, gather=gather, early_step=early_step, ranks=ranks)
    if profile.total_bytes == 0:
        return plain
    exposed, _ = relaxed_cuts(profile, link)
    if gather == "parameters" and not early_step:
        exposed = max(exposed, Window.of(profile).late(link))
    return max(plain, profile.compute + exposed)


def relaxed_cuts(profile: Profile, link: Link, exposed: float | None = None) -> tuple[float, list[float]]:
    """The least exposed time of the relaxation with start-ups, and buckets that reach it.

    A bucket is given by where it ends, in bytes counted from layer 0 up; the first one is the last that the
    backward fills. With ``exposed`` given, the buckets for that exposed time instead (none if it cannot be
    reached).
    """
    window = Window.of(profile)
    upto, below = window.upto.tolist(), window.below.tolist()
    total = upto[-1]

    def cuts(allowed: float) -> list[float]:
        # Bucket j from the front must pass, with the j - 1 before it, in the window of its lowest layer.
        # Larger is always better, because the next bucket's lowest layer is then higher and its window
        # longer.
        ends: list[float] = []
        reached = 0.0
        while reached < total:
            lowest = bisect_right(upto, reached)
            room = allowed + below[lowest] - 2 * link.alpha * (len(ends) + 1)
            end = room / (2 * link.beta) if link.beta else math.inf if room >= 0 else 0.0
            if end <= reached:
                return []
            reached = min(end, total)
            ends.append(reached)
        return ends

    if exposed is not None:
        return exposed, cuts(exposed)
    # One bucket never needs more; the factor covers rounding.
    low, high = 0.0, 2 * (link.alpha + link.beta * total) * (1 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle) else (middle, high)
    # `low` is infeasible or 0, so it is below the optimum: a bound must not round up.
    return low, cuts(high)
