"""Lower bounds: iteration times that no schedule can beat.

Each bound allows for one thing more than the one before it: the work alone, the order in which layers need
their bytes, and the start-up time of collectives.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.ir.actions import Kind
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Profile

# -- the trivial bound: neither the compute nor the wire can be shorter than its work ------------------------


# Every bound takes the options of a step as ``policies.plan`` takes them, so that one dictionary serves both.
# ``ranks`` is one of them and is not read: the link's costs are those of a job of that size already.


def trivial_bound(profile: Profile, link: Link, *, gather: str = "gradients", ranks: int = 2) -> float:
    """The larger of the compute and the time of all bytes on the busiest link; ignores dependencies."""
    wire = max(demand.per_byte for demand in demands(without_startups(link)))
    return max(compute_seconds(profile, gather), wire * profile.total_bytes)


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
#
# Two tiers. Bytes take four operations, on the link inside a host (``in`` seconds a byte) and on the link
# between hosts (``out`` seconds a byte, on bytes that leave the host)::
#
#       end of B(m)  RS inside | RS between | AG between | AG inside  start of F(m)
#
# ``S`` bytes in pieces of at least ``g`` bytes cannot pass their window in less than any of these::
#
#     2 out S + 2 in g         the link between hosts idles until a piece is summed inside, and while the last
#                              piece is handed on inside
#     2 in S                   the link inside works on every byte twice
#     in S + 2 out g + in g    after the last RS inside, that piece still takes its three other operations
#
# With pieces as small as one likes (``g = 0``) only the busier link is left: the bound is that of a single
# link with the larger of ``in`` and ``out``. It is reached: let the busier link follow earliest-due-date; the
# other one works on the same piece at the same time, which takes it no longer. So the bound holds for engines
# that overlap the tiers, and all the more for engines that do not.


def lower_bound(
    profile: Profile,
    link: Link,
    *,
    gather: str = "gradients",
    early_step: bool = False,
    ranks: int = 2,
    piece: float = 0.0,
) -> float:
    """Seconds per iteration that no schedule beats, start-up costs not counted. ``piece``: no bucket has
    fewer bytes; it counts in two tiers only, where an engine that does not overlap buckets has its segments
    of a bucket in both tiers at once.
    """
    window, ideal = LayerWindow.of(profile), without_startups(link)
    if isinstance(link, TwoTierLink) and not link.overlaps:
        piece = min(piece, link.segment)
    exposed = 0.0
    if profile.total_bytes:
        some = window.upto > 0  # without bytes at or below a layer, it does not wait
        for demand in demands(ideal, piece):
            wire = demand.fixed + demand.per_byte * window.upto[some]
            exposed = max(exposed, float(np.max(wire - window.below[some])))
    if gather == "parameters" and not early_step:
        exposed = max(exposed, window.late(ideal))
    return max(compute_seconds(profile, gather), profile.compute + exposed)


class Demand(NamedTuple):
    """The least seconds from the moment when buckets are ready until all are gathered: ``fixed``, and more
    for each bucket and each byte.
    """

    fixed: float
    per_bucket: float
    per_byte: float


def demands(link: Link, piece: float = 0.0) -> tuple[Demand, ...]:
    """One demand for a single link; for overlapping tiers the three of the proof above, with start-ups."""
    inside, between = link.parts
    if inside is None:
        return (Demand(0.0, 2 * between.alpha, 2 * between.beta),)
    first, other = inside.cost(Kind.RS, piece), between.cost(Kind.RS, piece)
    return (
        Demand(2 * first, 2 * between.alpha, 2 * between.beta),
        Demand(0.0, 2 * inside.alpha, 2 * inside.beta),
        Demand(2 * other + first, inside.alpha, inside.beta),
    )


def without_startups(link: Link) -> Link:
    """The same link without start-ups; two tiers overlap, whatever the engine does."""
    if not isinstance(link, TwoTierLink):
        return Link(0.0, link.beta)
    # Both tiers together were timed too: an engine that does not overlap cannot be faster than that.
    most = math.inf if link.overlaps else link.beta
    inside, between = (Link(0.0, min(tier.beta, most)) for tier in (link.inside, link.between))
    return TwoTierLink(0.0, link.beta, inside=inside, between=between, overlaps=True)


# -- the start-up bound: the preemptive bound where each RS and each AG pays the link's start-up -------------


def startup_bound(
    profile: Profile, link: Link, *, gather: str = "gradients", early_step: bool = False, ranks: int = 2
) -> float:
    """As ``lower_bound``, but each RS and each AG pays ``link.alpha``: tighter where that matters.

    Few buckets make bytes wait for each other, many buckets cost start-ups. This bound takes the best number
    of buckets, with collectives that can be preempted at no cost.
    """
    plain = lower_bound(profile, link, gather=gather, early_step=early_step)
    if profile.total_bytes == 0:
        return plain
    exposed, _ = relaxed_cuts(profile, link)
    if gather == "parameters" and not early_step:
        exposed = max(exposed, LayerWindow.of(profile).late(link))
    return max(plain, profile.compute + exposed)


def relaxed_cuts(profile: Profile, link: Link, exposed: float | None = None) -> tuple[float, list[float]]:
    """The least exposed time of the relaxation with start-ups, and buckets that reach it.

    A bucket is given by where it ends, in bytes counted from layer 0 up; the first one is the last that the
    backward fills. With ``exposed`` given, the buckets for that exposed time instead (none if it cannot be
    reached).
    """
    window = LayerWindow.of(profile)
    upto, below = window.upto.tolist(), window.below.tolist()
    total = upto[-1]

    needs = demands(link)
    # A bucket's own operations follow each other: with one link, what one bucket takes anyway.
    inside, between = link.parts
    tiers = () if inside is None else (inside, between)
    alone = 2 * sum(tier.alpha for tier in tiers), 2 * sum(tier.beta for tier in tiers)

    def cuts(allowed: float) -> list[float]:
        # Bucket j from the front must pass, with the j - 1 before it, in the window of its lowest layer.
        # Larger is always better, because the next bucket's lowest layer is then higher and its window
        # longer.
        ends: list[float] = []
        reached = 0.0
        while reached < total:
            window = allowed + below[bisect_right(upto, reached)]
            number = len(ends) + 1
            end = min(_fitting(window - n.fixed - n.per_bucket * number, n.per_byte) for n in needs)
            if tiers:
                end = min(end, reached + _fitting(window - alone[0], alone[1]))
            if end <= reached:
                return []
            reached = min(end, total)
            ends.append(reached)
        return ends

    if exposed is not None:
        return exposed, cuts(exposed)
    # One bucket never needs more; the factor covers rounding.
    most = max(need.fixed + need.per_bucket + need.per_byte * total for need in needs)
    low, high = 0.0, max(most, alone[0] + alone[1] * total) * (1 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle) else (middle, high)
    # `low` is infeasible or 0, so it is below the optimum: a bound must not round up.
    return low, cuts(high)


def _fitting(room: float, per_byte: float) -> float:
    """The bytes for which there is room."""
    return room / per_byte if per_byte else math.inf if room >= 0 else 0.0


# -- the window of layer m: the compute during which the bytes of layers 0 to m must cross the link ----------


@dataclass(frozen=True)
class LayerWindow:
    """Per layer m: bytes of layers 0 to m, and compute of the layers below m."""

    upto: np.ndarray
    forward_below: np.ndarray
    backward_below: np.ndarray

    @classmethod
    def of(cls, profile: Profile) -> LayerWindow:
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
        inside, between = link.parts
        start, rate = between.alpha, between.beta
        if inside is not None:  # at least one bucket starts twice, and the busier link works on all bytes
            start, rate = start + inside.alpha, max(rate, inside.beta)
        wire = start + rate * self.upto[some]
        reduces = max(0.0, float((wire - self.backward_below[some]).max()))
        return reduces + float((wire - self.forward_below[some]).max())


def compute_seconds(profile: Profile, gather: str) -> float:
    """Seconds of compute on each rank; with gathered gradients every rank also updates everything."""
    return profile.compute + (profile.update_per_byte * profile.total_bytes if gather == "gradients" else 0.0)
