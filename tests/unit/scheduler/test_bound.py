"""Lower bounds: against hand-made cases, preemptive earliest-due-date, and every way to cut and order small
models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.bounds import lower_bound, relaxed_cuts, startup_bound, trivial_bound
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Profile
from scheduler.policies.problem import Problem
from scheduler.policies.published import sequential
from tests.support.scheduling_problems import (
    all_orders,
    links,
    make_profile,
    profiles,
    tiers,
    two_tiers,
)


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


def test_two_tiers_by_hand() -> None:
    """As one link with the slower tier's rate; an engine that does not overlap tiers is no faster."""
    profile = make_profile([1, 3, 0], [1, 1, 1], [2, 2, 2])
    slow, fast = Link(0.0, 1.0), Link(0.0, 0.25)
    for link in (two_tiers(fast, slow), two_tiers(slow, fast), two_tiers(fast, slow, overlaps=False)):
        assert lower_bound(profile, link) == 9 + 5
        assert lower_bound(profile, link, gather="parameters") == lower_bound(
            profile, slow, gather="parameters"
        )
    assert trivial_bound(profile, two_tiers(Link(0.0, 9.0), slow)) == 72
    # The first byte is summed inside before the link between hosts begins, and the last one handed on after.
    assert lower_bound(profile, two_tiers(fast, slow), piece=1) == 9 + 5.5
    # Timed together, the tiers took less than the slower one alone, which then is no bound.
    faster = TwoTierLink(0.0, 1.0, inside=fast, between=Link(0.0, 3.0))
    assert lower_bound(profile, faster) == 9 + 5
    # Segments of 1 byte are in both tiers at once: one of each RS and AG waits for the other tier, no bucket.
    cut, one = TwoTierLink(0.0, 1.0, inside=slow, between=slow, segment=1.0), make_profile([3], [0], [1])
    problem = Problem(one, cut)
    assert lower_bound(one, cut, piece=3) == problem.period(sequential(problem)) == 1 + 8
    # One bucket, alone in its window: RS takes 0.5 + 0.25 inside and 0.5 + 1 between hosts, AG the same.
    one = make_profile([1], [1], [1])
    assert startup_bound(one, two_tiers(Link(0.5, 0.25), Link(0.5, 1.0))) == pytest.approx(2 + 4.5)
    # Timed together, both tiers take 3 s a byte: the start-up bound of an engine that does not overlap them.
    together = TwoTierLink(0.5, 3.0, inside=Link(0.2, 1.0), between=Link(0.3, 2.0))
    assert startup_bound(one, together) == pytest.approx(2 + 7)


Byte = tuple[int, int, int]
"""A byte's layer, its operation, and the seconds that this operation still takes. The operations are RS
inside the host, RS and AG between hosts, AG inside.
"""


def seconds_later(state: tuple[Byte, ...], able: set[int], seconds: tuple[int, ...]) -> Iterator[list[Byte]]:
    """Every state that can follow: each link works on any byte that waits for it, unless there is none."""
    choices = [
        [byte for byte in set(state) if byte[0] in able and byte[1] in operations] or [None]
        for operations in ((0, 3), (1, 2))
    ]
    for chosen in itertools.product(*choices):
        after = list(state)
        for byte in filter(None, chosen):
            layer, operation, left = byte
            after.remove(byte)
            if left > 1:
                after.append((layer, operation, left - 1))
            elif operation < 3:
                after.append((layer, operation + 1, seconds[operation + 1]))
        yield after


def least_exposed(profile: Profile, inside: int, between: int) -> int:
    """The least exposed seconds of all schedules on two links, second by second."""
    compute = [(int(layer.forward), int(layer.backward)) for layer in profile.layers]
    ready = [sum(b for _, b in compute[layer:]) for layer in range(len(compute))]
    due = [ready[0] + sum(f for f, _ in compute[:layer]) for layer in range(len(compute))]
    seconds = (inside, between, between, inside)
    begin = tuple((layer, 0, inside) for layer, size in enumerate(profile.sizes) for _ in range(size))
    for exposed in itertools.count():
        states = {begin}
        for now in range(due[-1] + exposed + 1):
            late = {layer for layer, moment in enumerate(due) if now >= moment + exposed}
            able = {layer for layer, moment in enumerate(ready) if now >= moment}
            states = {
                tuple(sorted(after))
                for state in states
                if not any(layer in late for layer, _, _ in state)
                for after in seconds_later(state, able, seconds)
            }
        if states:
            return exposed
    raise AssertionError


small = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(
    small.filter(lambda rows: sum(row[0] for row in rows) <= 4),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(1, 3),
)
def test_two_tiers_equal_the_best_of_all_schedules(
    rows: list[tuple[int, int, int]], inside: int, between: int
) -> None:
    """Up to four layers and four bytes, interrupted at whole seconds. Where a byte takes the host a second,
    both are equal; else gaps shorter than a byte remain on a link, which smaller bytes would fill.
    """
    profile = make_profile(*zip(*rows, strict=True))
    link = two_tiers(Link(0.0, inside), Link(0.0, between))
    exposed = lower_bound(profile, link, piece=1) - profile.compute
    gaps = 0 if inside == 1 else inside + between
    assert exposed <= least_exposed(profile, inside, between) <= exposed + gaps


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
@given(profiles(most_layers=3), links() | tiers(), st.sampled_from(["gradients", "late", "early"]))
def test_no_order_of_any_buckets_beats_a_bound(profile: Profile, link: Link, step: str) -> None:
    """Nor the bound for buckets of at least so many bytes, which an engine may cut into segments."""
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
        pieces = lower_bound(profile, link, **problem.step, piece=min(bucket.bytes for bucket in buckets))
        for order in all_orders(len(buckets), late=problem.gathers_late):
            assert model.period(model.encode(order)) >= max(bound, pieces) * (1 - 1e-12)


@given(profiles(updates=False), st.sampled_from([1e-7, 1e-5]))
def test_without_startup_both_bounds_agree(profile: Profile, beta: float) -> None:
    link = Link(0.0, beta)
    assert startup_bound(profile, link) == pytest.approx(lower_bound(profile, link), rel=1e-9)


@given(profiles(), links() | tiers())
def test_relaxed_cuts_cover_the_model(profile: Profile, link: Link) -> None:
    if profile.total_bytes:
        _, ends = relaxed_cuts(profile, link)
        assert ends == sorted(ends)
        assert ends[-1] == profile.total_bytes
