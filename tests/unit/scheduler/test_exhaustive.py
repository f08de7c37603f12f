"""``optimal`` against every order there is, for up to five buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import policies
from scheduler.ir.actions import Kind
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link, TwoTierLink
from scheduler.ir.profile import Profile
from scheduler.policies.problem import Problem
from tests.support.scheduling_problems import all_orders, links, make_profile, profiles, tiers

STEPS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "late": {"gather": "parameters"},
    "early": {"gather": "parameters", "early_step": True},
}


def best_of_all(problem: Problem, buckets: tuple[Bucket, ...]) -> float:
    model = problem.model(buckets)
    orders = all_orders(len(buckets), late=problem.gathers_late)
    return min(model.period(model.encode(order)) for order in orders)


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS)
@settings(max_examples=10, deadline=None)
@given(profile=profiles(most_layers=4), link=links(), data=st.data())
def test_equals_every_order_of_few_buckets(
    step: str, profile: Profile, link: Link, data: st.DataObject
) -> None:
    """Buckets of any shape: whole layers, several, and two halves of one."""
    problem = Problem(profile, link, **STEPS[step])
    limit = data.draw(st.sampled_from([None, 50, 1000]))
    buckets = problem.fuse(limit)
    if len(buckets) <= 3 and buckets:
        buckets = split_first(buckets)
    if not buckets:
        return
    program = policies.plan(profile, link, "optimal", buckets=buckets, **STEPS[step])
    assert problem.period(program) == pytest.approx(best_of_all(problem, buckets), rel=1e-9, abs=1e-12)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(profile=profiles(most_layers=3), link=tiers(), step=st.sampled_from(list(STEPS)))
def test_two_tiers_against_every_order_between_hosts(profile: Profile, link: TwoTierLink, step: str) -> None:
    """Branch and bound leaves out that the link inside a host does one thing at a time, and so may miss the
    best order by as much as one bucket takes there.
    """
    problem = Problem(profile, link, **STEPS[step])
    buckets = problem.fuse(None)
    if not buckets:
        return
    program = policies.plan(profile, link, "optimal", buckets=buckets, **STEPS[step])
    best = best_of_all(problem, buckets)
    times = [sum(link.times(Kind.RS, bucket.bytes)) for bucket in buckets]
    assert best * (1 - 1e-12) <= problem.period(program) <= best + 2 * max(times) + 1e-12


def split_first(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """The first piece of the first bucket in two buckets of its own."""
    piece, *others = buckets[0].pieces
    middle = (piece.start + piece.stop) // 2
    if middle == piece.start:
        return buckets
    parts = (Piece(piece.layer, piece.start, middle), Piece(piece.layer, middle, piece.stop))
    rest = (Bucket((*others, parts[1])) if others else Bucket((parts[1],)),)
    return (Bucket((parts[0],)), *rest, *buckets[1:])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
@pytest.mark.parametrize("step", STEPS)
def test_equals_every_order_of_five_buckets(step: str, seed: int) -> None:
    """113,400 orders each (late: 14,400); times of about the same size, where the order matters most."""
    rng = np.random.default_rng(seed)
    profile = make_profile(
        rng.integers(1, 10, 5).tolist(),
        rng.integers(0, 8, 5).tolist(),
        rng.integers(0, 8, 5).tolist(),
        update=0.0 if seed < 4 else 0.3,
    )
    problem = Problem(profile, Link(float(seed % 2), 1.0), **STEPS[step])
    buckets = problem.fuse(None)
    program = policies.plan(profile, problem.link, "optimal", buckets=buckets, **STEPS[step])
    assert problem.period(program) == pytest.approx(best_by_insertion(problem, buckets), rel=1e-12)


def best_by_insertion(problem: Problem, buckets: tuple[Bucket, ...]) -> float:
    """As ``best_of_all``, without looking at the many permutations that are no orders."""
    model = problem.model(buckets)
    count = len(buckets)
    best = np.inf
    orders: list[list[int]] = [[]]
    while orders:
        order = orders.pop()
        if len(order) == 2 * count:
            best = min(best, model.period(np.array(order)))
        reduced = [b for b in order if b < count]
        for b in range(count):
            if b not in order:
                orders.append([*order, b])
            elif count + b not in order and (not problem.gathers_late or len(reduced) == count):
                orders.append([*order, count + b])
    return best
