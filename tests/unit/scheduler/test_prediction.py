"""What DDP would expose on a profile: its optimizer waits for every bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler import policies
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Layer, Profile
from scheduler.policies.prediction import predict, simulate_ddp
from scheduler.simulate.simulator import simulate

MIB = 1 << 20
# An all-reduce of 4 MiB takes 3 seconds. Each layer is a bucket of its own, since DDP's first one is small.
LINK = Link(alpha=0.0, beta=1.5 / (4 * MIB))
PROFILE = Profile(
    "two layers",
    (Layer("outside", 1.0, 0.0, 0), Layer("first", 1.0, 2.0, 4 * MIB), Layer("last", 1.0, 2.0, 4 * MIB)),
)


def test_the_optimizer_waits_for_all_buckets() -> None:
    """B(last) 0-2, AR 2-5, AR(first) 5-8, then one second each of optimizer, first and last forward."""
    found = simulate_ddp(PROFILE, LINK, 2)
    assert found.period == pytest.approx(11.0) and found.exposed == pytest.approx(4.0)
    without_barrier = simulate(policies.plan(PROFILE, LINK, "wfbp"), PROFILE, LINK)
    assert without_barrier.period == pytest.approx(10.0)


def test_two_tiers_and_a_ring_for_ddp() -> None:
    """2 hosts of 2 ranks. In two tiers, half of a bucket crosses a card: 1.5 s for 4 MiB. In DDP's ring, 3/4
    of it do: an RS takes 2.25 s, an AR 4.5 s.

    Ours: B(last) 0-2, RS 2-3.5, B(first) 2-4, RS 4-5.5, AG(first) 5.5-7, AG(last) 7-8.5, F(last) 8.5-9.5.
    DDP: B(last) 0-2, AR 2-6.5, AR 6.5-11, then one second each of optimizer, first and last forward.
    """
    inside = Link(0.0, 0.25 / (4 * MIB))
    tiers = TwoTierLink(0.0, LINK.beta, inside=inside, between=LINK, members=(2, 2))
    program = policies.plan(PROFILE, tiers, "dear", ranks=4, bucket_bytes=4 * MIB)
    found = predict(program, PROFILE, tiers)
    assert found.period == pytest.approx(9.5)
    assert found.ddp_period == pytest.approx(14.0) and found.ddp_exposed == pytest.approx(7.0)
    uncounted = predict(program, PROFILE, replace(tiers, members=()))
    assert uncounted.ddp_period == pytest.approx(11.0), "as for ranks that have a host each"


def test_small_layers_share_a_bucket() -> None:
    """24 MiB stay below DDP's limit: behind the backward comes one all-reduce of 18 seconds."""
    layers = tuple(Layer(f"{i}", 1.0, 1.0, 4 * MIB) for i in range(7))
    found = simulate_ddp(Profile("seven", layers), LINK, 2)
    assert found.period == pytest.approx(7.0 + 7.0 + 18.0)


def test_compute_beside_traffic_is_slower() -> None:
    """Of 4 seconds of backward, 2 lie beside traffic and take one second longer."""
    slowed = simulate_ddp(PROFILE, LINK, 2, slowdown=0.5)
    assert slowed.period == pytest.approx(11.0), "the link is the bottleneck: its end does not move"
    fast = Link(0.0, LINK.beta / 3)
    plain, slowed = (simulate_ddp(PROFILE, fast, 2, slowdown=s).period for s in (0.0, 0.5))
    assert plain == pytest.approx(8.0) and 8.0 < slowed <= 8.5


def test_a_prediction_holds_both() -> None:
    program = policies.plan(PROFILE, LINK, "dear")
    found = predict(program, PROFILE, LINK)
    ours = simulate(program, PROFILE, LINK)
    assert (found.period, found.exposed) == (ours.period, ours.exposed)
    assert (found.ddp_period, found.ddp_exposed) == pytest.approx((11.0, 4.0))
    assert found.bound <= found.period <= found.ddp_period
