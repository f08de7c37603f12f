"""What the scheduler says about a measured profile: the lower bound, and the time of each policy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler import policies
from scheduler.bound import lower_bound
from scheduler.link import Link, Network, fit
from scheduler.profile import Layer, Profile
from scheduler.simulator import simulate

SCALES = (2, 4, 8, 16, 32)


def mean_profile(profiles: Sequence[dict[str, Any]]) -> Profile:
    """One profile from every rank's: the mean per layer."""
    parsed = [Profile.from_dict(profile) for profile in profiles]
    layers = tuple(
        Layer(
            same[0].name,
            statistics.mean(layer.forward for layer in same),
            statistics.mean(layer.backward for layer in same),
            same[0].bytes,
        )
        for same in zip(*(profile.layers for profile in parsed), strict=True)
    )
    update = statistics.mean(profile.update_per_byte for profile in parsed)
    return Profile(parsed[0].name, layers, update, parsed[0].source)


def with_times_of(profile: Profile, other: Profile) -> Profile:
    """The same model with the layers' times of another run. Updates stay: a floor's end is its exchange's."""
    return replace(other, update_per_byte=profile.update_per_byte, source="measured beside the same traffic")


def fit_link(samples: Sequence[Sequence[tuple[int, float]]]) -> Link:
    """The link from every rank's timings; a collective has ended when its last rank has."""
    slowest: dict[int, float] = {}
    for rank in samples:
        for size, seconds in rank:
            slowest[size] = max(seconds, slowest.get(size, 0.0))
    return fit(list(slowest), list(slowest.values()), "measured")


def bound_of(profile: Profile, link: Link) -> float:
    return lower_bound(profile, link)


def predicted_time(policy: str, profile: Profile, link: Link, ranks: int) -> float | None:
    """Seconds per iteration of a policy by simulation; None for a name the scheduler does not have."""
    name = "optimal" if policy == "auto" else policy
    if name not in policies.names():
        return None
    return simulate(policies.plan(profile, link, name, ranks=ranks), profile, link).period


def scaling(policy: str, profile: Profile, link: Link, measured_at: int) -> list[tuple[int, float]]:
    """(ranks, predicted seconds) for more ranks than were measured, each on a link like the measured one."""
    if measured_at < 2:
        return []
    # Measured was an exchange among `measured_at` ranks, in which a share of every message stays at home.
    wire = Link(link.alpha, link.beta * measured_at / (measured_at - 1))
    curve = []
    for ranks in SCALES:
        time = predicted_time(policy, profile, Network.flat(wire, ranks, "direct").link(), ranks)
        if time is not None:
            curve.append((ranks, time))
    return curve
