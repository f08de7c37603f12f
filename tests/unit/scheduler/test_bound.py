"""Lower bounds: against hand-made cases, preemptive earliest-due-date, and every way to cut and order small
models."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.bounds import lower_bound, relaxed_cuts, startup_bound, trivial_bound
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.policies.problem import Problem
from tests.support.scheduling_problems import all_orders, links, make_profile, profiles


def test_by_hand() -> None:
    """Layer 0 is exposed whole (2 s); layers 0 and 1 need 8 s in a window with 1 + 2 s of compute: 5 s
    exposed."""
    profile = make_profile([1, 3, 0], [1, 1, 1], [2, 2, 2])
    link = Link(0.0, 1.0)
    assert lower_bound(profile, link) == 9 + 5
    assert trivial_bound(profile, link) == 9
    assert trivial_bound(profile, Link(0.0, 10.0)) == 80


def test_startup_by_hand() -> None:
    """One bucket exposes 2 * (4 + 0.5) s. With two, both can be made to expose 7 s and none less than
    that."""
    profile = make_profile([1, 3, 0], [1, 1, 1], [2, 2, 2])
    exposed, ends = relaxed_cuts(profile, Link(0.5, 1.0))
    # The cut lies inside layer 1: 2 * 3 + 1 for the first bucket, 2 * 4 + 2 - 3 for both in its window.
    assert exposed == pytest.approx(7.0)
    assert ends == pytest.approx([3.0, 4.0])
    assert startup_bound(profile, Link(0.5, 1.0)) == pytest.approx(9 + 7)


def test_sharded_gathers_wait_for_the_backward() -> None:
    """RS(0) ends 1 s after the backward; 4 s of AGs follow, of which F(0) hides one."""
    profile = make_profile([1, 3], [1, 1], [100, 100])
    link = Link(0.0, 1.0)
    assert lower_bound(profile, link) == 202 + 2
    assert lower_bound(profile, link, gather="parameters") == 202 + 4
    assert lower_bound(profile, link, gather="parameters", early_step=True) == 202 + 2


def test_sharded_startups() -> None:
    """Layer 0 has nothing to send: both RS and AG of layer 1 are partly hidden, by B(0) and F(0)."""
    profile = make_profile([0, 3], [1, 1], [2, 2])
    link = Link(0.5, 1.0)
    assert startup_bound(profile, link, gather="parameters") == 6 + (3.5 - 2) + (3.5 - 1)
    assert startup_bound(make_profile([0, 1], [9, 1], [9, 1]), link, gather="parameters") == 20
    assert lower_bound(make_profile([0, 1], [9, 1], [0, 1]), link, gather="parameters") == 11


def test_updates_count_as_compute_where_every_rank_does_them_all() -> None:
    profile = make_profile([10], [1], [1], update=3.0)
    assert lower_bound(profile, Link(0.0, 0.0)) == 32
    assert lower_bound(profile, Link(0.0, 0.0), gather="parameters") == 2


def preemptive_edd(profile: Profile, link: Link) -> float:
    """The best preemptive order of one RS and one AG per layer, run in small steps of equal length.

    Times are whole numbers and every job is cut into unit pieces, so the rule can be followed literally: each
    second belongs to the ready job that is due first.
    """
    end_of_backward = 0.0
    ready = {}
    for layer in reversed(range(len(profile.layers))):
        end_of_backward += profile.layers[layer].backward
        ready[layer] = end_of_backward
    due = {}  # seconds before the end of the iteration
    rest = 0.0
    for layer in reversed(range(len(profile.layers))):
        rest += profile.layers[layer].forward
        due[layer] = rest
    left = {("RS", n): link.beta * size for n, size in enumerate(profile.sizes) if size}
    left |= {("AG", n): link.beta * size for n, size in enumerate(profile.sizes) if size}

    def urgency(job: tuple[str, int]) -> float:
        return due[job[1]] + (left["AG", job[1]] if job[0] == "RS" else 0)

    now, latest = 0.0, end_of_backward + rest
    while left:
        able = [
            job for job in left if ready[job[1]] <= now and (job[0] == "RS" or ("RS", job[1]) not in left)
        ]
        if able:
            job = max(able, key=urgency)
            left[job] -= 1
            if left[job] == 0:
                del left[job]
                latest = max(latest, now + 1 + due[job[1]])
        now += 1
    return latest


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=5), st.integers(1, 3))
def test_equals_preemptive_earliest_due_date(rows: list[tuple[int, int, int]], beta: int) -> None:
    profile = make_profile(*zip(*rows, strict=True))
    assert lower_bound(profile, Link(0.0, beta)) == preemptive_edd(profile, Link(0.0, beta))


def every_cut(sizes: tuple[int, ...]) -> list[tuple[Bucket, ...]]:
    """Every way to group neighbouring layers into buckets."""
    layers = [n for n in reversed(range(len(sizes))) if sizes[n]]
    ways = []
    for marks in itertools.product([False, True], repeat=max(0, len(layers) - 1)):
        groups, current = [], layers[:1]
        for layer, cut in zip(layers[1:], marks, strict=True):
            if cut:
                groups.append(current)
                current = []
            current = [*current, layer]
        groups.append(current)
        ways.append(tuple(Bucket(tuple(Piece(n, 0, sizes[n]) for n in group)) for group in groups))
    return ways


@settings(max_examples=60, deadline=None)
@given(profiles(most_layers=3), links(), st.sampled_from(["gradients", "late", "early"]))
def test_no_order_of_any_buckets_beats_a_bound(profile: Profile, link: Link, step: str) -> None:
    gather = "gradients" if step == "gradients" else "parameters"
    problem = Problem(profile, link, gather, step == "early")
    bound = startup_bound(profile, link, **problem.step)
    plain = lower_bound(profile, link, **problem.step)
    assert trivial_bound(profile, link, gather=gather) <= plain * (1 + 1e-12)
    assert plain <= bound * (1 + 1e-12)
    if not profile.total_bytes:
        return
    for buckets in every_cut(profile.sizes):
        model = problem.model(buckets)
        for order in all_orders(len(buckets), late=problem.gathers_late):
            assert model.period(model.encode(order)) >= bound * (1 - 1e-12)


@given(profiles(updates=False), st.sampled_from([1e-7, 1e-5]))
def test_without_startup_both_bounds_agree(profile: Profile, beta: float) -> None:
    link = Link(0.0, beta)
    assert startup_bound(profile, link) == pytest.approx(lower_bound(profile, link), rel=1e-9)


@given(profiles(), links())
def test_relaxed_cuts_cover_the_model(profile: Profile, link: Link) -> None:
    if profile.total_bytes:
        _, ends = relaxed_cuts(profile, link)
        assert ends == sorted(ends)
        assert ends[-1] == profile.total_bytes
