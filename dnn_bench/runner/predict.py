"""The scheduler's predictions for a measured profile: the lower bound, and the time of each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dnn_bench.baselines.registry import OURS, PEER, get
from dnn_bench.runner.results import Row
from scheduler import policies
from scheduler.bounds import lower_bound, trivial_bound
from scheduler.ir.link import Level, Link, fit, network_link
from scheduler.ir.profile import Layer, Profile
from scheduler.simulate.simulator import simulate

Rounds = Sequence[Sequence[dict[str, Any]]]  # profiles, of every repetition every rank's
# What is measured beside these limits' times in every repetition, since the machine's speed changes.
MEASURED: dict[str, tuple[Any, ...]] = {"local": ("profile", 2), "floor": ("profile", 2), "wire": ("link",)}
Measured = dict[str, list[Any]]  # per limit and repetition, every rank's
SCALES = (2, 4, 8, 16, 32)
ROUGH_FIT = 0.15  # error of the link's fit beyond which it is said
FEWER = 0.8  # of the bytes
ROUGH_BOUND = 0.05  # how much a baseline may be below its lower bound, which was measured too


def predictions(measured: Measured, rows: Sequence[Row], ranks: int, per_host: int = 1) -> dict[str, Any]:
    """What the scheduler makes of profiles and link, as JSON-ready data; also sets the rows' predictions.

    More ranks are predicted where each has a link of its own.
    """
    found: dict[str, Any] = {"profile": None, "link": None, "bound": None, "bound_beside": None}
    found |= {"bounds": [], "bounds_beside": [], "scaling": {}, "doubts": []}
    alone, beside = measured["local"], measured["floor"]
    if not alone or not measured["wire"]:
        return found
    try:
        link, profile = fit_link(measured["wire"]), merge_profiles(alone)
        found |= {"profile": profile.to_dict(), "link": link.to_dict()}
        found |= {"bound": lower_bound(profile, link), "bounds": bounds_of(alone, alone, link)}
        if beside:
            profile = with_times_of(profile, merge_profiles(beside))
            found["bound_beside"] = lower_bound(profile, link)
            found["bounds_beside"] = bounds_of(alone, beside, link)
    except ValueError as error:
        found["doubts"].append(f"no lower bound and no predictions: {error}")
        return found
    for row in (row for row in rows if row.kind == OURS):
        try:
            row.predicted = row.predicted or predicted_time(row.name, profile, link, ranks)
            if per_host == 1 and (curve := scaling(row.name, profile, link, ranks)):
                found["scaling"][row.name] = curve
        except ValueError as error:
            found["doubts"].append(f"no prediction for {row.name}: {error}")
    # Split backwards may be faster than the bound for autograd's order.
    bounds = {PEER: found["bound"], OURS: trivial_bound(profile, link)}
    found["doubts"] += doubts(link, bounds, rows)
    return found


def merge_profiles(rounds: Rounds) -> Profile:
    """One profile from every rank's in every repetition: of each repetition the slowest rank's, for which the
    others wait; per layer the median over the repetitions.
    """
    profiles = [
        max((Profile.from_dict(each) for each in ranks), key=lambda profile: profile.compute)
        for ranks in rounds
    ]
    layers = tuple(
        Layer(
            same[0].name,
            median(layer.forward for layer in same),
            median(layer.backward for layer in same),
            same[0].bytes,
        )
        for same in zip(*(profile.layers for profile in profiles), strict=True)
    )
    update = median(profile.update_per_byte for profile in profiles)
    return Profile(profiles[0].name, layers, update, profiles[0].source)


def with_times_of(profile: Profile, other: Profile) -> Profile:
    """The same model with the layers' times of another run. Updates stay: a floor's end is its exchange's."""
    return replace(other, update_per_byte=profile.update_per_byte, source="measured beside the same traffic")


def fit_link(rounds: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> Link:
    """The link from every rank's timings in every repetition: a collective has ended when its last rank has,
    and one repetition in which the machine did something else must not make the link slower than it is.
    """
    times: dict[int, list[float]] = {}
    for ranks in rounds:
        for same in zip(*ranks, strict=True):
            times.setdefault(same[0][0], []).append(max(seconds for _, seconds in same))
    return fit(list(times), [median(several) for several in times.values()], "measured")


def doubts(link: Link, bounds: Mapping[str, float], rows: Sequence[Row]) -> list[str]:
    """Signs that link or compute were slower while they were timed alone than beside the baselines."""
    found = []
    if link.error > ROUGH_FIT:
        found.append(
            f"the link's times scatter by {link.error:.0%} about a start-up and a rate, and bounds and"
            " predictions with them; take more repetitions, on a machine that does nothing else"
        )
    whole = sum(row.mean("sent") for row in rows if row.name == "wire" and row.measured)
    for row in rows:
        if row.changes:
            continue  # the profile is of another training
        if get(row.name).plans_itself:
            continue  # it may send parts of gradients early
        bound = bounds.get(row.kind, 0.0)
        if row.measured and row.mean("sent") < FEWER * whole:
            continue  # by rows, which the bound does not know
        if row.measured and median(row.times) < (1 - ROUGH_BOUND) * bound:
            less = 1 - median(row.times) / bound
            found.append(
                f"{row.name} is {less:.0%} faster than the lower bound, which cannot be: link or compute were"
                " slower when they were timed; take more repetitions"
            )
    return found


def bounds_of(alone: Rounds, compute: Rounds, link: Link) -> list[float]:
    """The lower bound of every repetition, for the layers' times in `compute`."""
    pairs = zip(alone, compute, strict=False)
    profiles = [with_times_of(merge_profiles([one]), merge_profiles([other])) for one, other in pairs]
    return [lower_bound(profile, link) for profile in profiles]


def predicted_time(policy: str, profile: Profile, link: Link, ranks: int) -> float:
    """Seconds per iteration of a policy by simulation."""
    name = "optimal" if policy.startswith("auto") else policy
    return simulate(policies.plan(profile, link, name, ranks=ranks), profile, link).period


def scaling(policy: str, profile: Profile, link: Link, measured_at: int) -> list[tuple[int, float]]:
    """(ranks, predicted seconds) for more ranks than were measured, each on a link like the measured one."""
    if measured_at < 2:
        return []
    # Measured was an exchange among `measured_at` ranks, in which a share of every message stays at home.
    beta = link.beta * measured_at / (measured_at - 1)
    curve = []
    for ranks in SCALES:
        wider = network_link([Level(ranks, link.alpha, beta)], "direct")
        curve.append((ranks, predicted_time(policy, profile, wider, ranks)))
    return curve
