"""Lower bounds: iteration times that no schedule can beat.

Each bound allows for one thing more than the one before it: the work alone, the order in which layers need
their bytes, and the start-up time of collectives.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from scheduler.ir.link import Link
from scheduler.ir.profile import Profile

# -- the trivial bound: neither the compute nor the wire can be shorter than its work ------------------------


def trivial_bound(profile: Profile, link: Link, *, gather: str = "gradients", ranks: int = 2) -> float:
    """The larger of the compute and the link time of all bytes; ignores dependencies."""
    return max(compute_seconds(profile, gather), 2 * link.beta * profile.total_bytes)


# -- the preemptive bound ------------------------------------------------------------------------------------

# The time that no order, no buckets and no splitting of a data-parallel step can beat, start-up costs not
# counted.
#
# Everything layers ``0..m`` send, reduce-scatter and all-gather, has to pass the link between the end of
# ``B(m)`` (nothing of it is ready before) and the start of ``F(m)`` of the next iteration (all of it is
# needed by then)::
#
#       B(L-1) ... B(m) | B(m-1) ... B(0)  F(0) ... F(m-1) | F(m) ... F(L-1)
#                       |<------ wire(0..m) must fit ----->|
#
# That window holds the compute of the layers below ``m``. Whatever does not fit is exposed::
#
#     exposed >= max over m of  wire(0..m) - compute(0..m-1)
#
# This is the value of preemptive earliest-due-date (an AG is due when its forward starts, an RS earlier by
# its AG), since releases and due dates are nested: with tensors cut small, no start-up cost and free
# preemption it is reached, so it is the best bound that ignores start-up. ``startup_bound`` counts the
# start-ups too.


def lower_bound(
    profile: Profile, link: Link, *, gather: str = "gradients", early_step: bool = False, ranks: int = 2
) -> float:
    """Seconds per iteration that no schedule beats, start-up costs not counted."""
    window = Window.of(profile)
    exposed = float(np.max(2 * link.beta * window.upto - window.below))
    if gather == "parameters" and not early_step:
        exposed = max(exposed, window.late(Link(0.0, link.beta)))
    return max(compute_seconds(profile, gather), profile.compute + exposed)


# -- the start-up bound: the preemptive bound where each RS and each AG pays the link's start-up -------------


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


# -- the window of layer m: the compute during which the bytes of layers 0 to m must cross the link ----------


@dataclass(frozen=True)
class Window:
    """Per layer m: bytes of layers 0 to m, and compute of the layers below m."""

    upto: np.ndarray
    forward_below: np.ndarray
    backward_below: np.ndarray

    @classmethod
    def of(cls, profile: Profile) -> Window:
        forward = np.array([layer.forward for layer in profile.layers])
        backward = np.array([layer.backward for layer in profile.layers])
        return cls(
            np.cumsum(np.array(profile.sizes, float)), *(np.cumsum(t) - t for t in (forward, backward))
        )

    @property
    def below(self) -> np.ndarray:
        return self.forward_below + self.backward_below

    def late(self, link: Link) -> float:
        """Exposed time if every AG comes after the last RS: exposed part of the RS plus that of the AG."""
        some = self.upto > 0  # without bytes at or below a layer, it does not wait
        if not some.any():
            return 0.0
        wire = link.alpha + link.beta * self.upto[some]
        reduces = max(0.0, float((wire - self.backward_below[some]).max()))
        return reduces + float((wire - self.forward_below[some]).max())


def compute_seconds(profile: Profile, gather: str) -> float:
    """Seconds of compute on each rank; with gathered gradients every rank also updates everything."""
    return profile.compute + (profile.update_per_byte * profile.total_bytes if gather == "gradients" else 0.0)
