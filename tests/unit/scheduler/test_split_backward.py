"""Weight gradients in places of their own: the bound, the search and the model, against every order of small
cases.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import policies, profiles
from scheduler.bounds import lower_bound, split_bound
from scheduler.bounds.split import Parts, _makespans, fluid_exposed, split_exposed
from scheduler.ir.actions import Action, Kind, parse_actions
from scheduler.ir.buckets import fuse_by_bytes
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem
from scheduler.policies.search.weight_search import backward_orders
from scheduler.simulate.simulator import simulate
from scheduler.simulate.step_model import gradient_times
from scheduler.validate import validate

Order = tuple[Action, ...]


def model(layers: int, seed: int, alike: bool = False, kept: int = 0) -> tuple[Profile, Link]:
    """A model, and a link on which all bytes take about as long as its compute."""
    dice = random.Random(seed)

    def seconds() -> float:
        return 1.0 if alike else dice.uniform(0.2, 2.0)

    rows = tuple(
        Layer(f"l{n}", seconds(), b + w if n else w, dice.randint(10, 100) ** 2, kept, w)
        for n, (b, w) in enumerate((seconds(), seconds()) for _ in range(layers))
    )
    profile = Profile("made up", rows)
    ratio = dice.uniform(0.6, 1.2)
    return profile, Link(0.0, ratio * profile.compute / (2 * profile.total_bytes))


def every_backward(layers: int) -> Iterator[Order]:
    """Every order of the B and W of so many layers: each waits for the B of the layer above."""

    def grow(order: list[Action], left: list[Action], next_: int) -> Iterator[Order]:
        if next_ < 0 and not left:
            yield tuple(order)
        if next_ >= 0:
            more = [*left, Action(Kind.W, next_ - 1)] if next_ else left
            yield from grow([*order, Action(Kind.B, next_)], more, next_ - 1)
        for weight in left:
            yield from grow([*order, weight], [other for other in left if other != weight], next_)

    return grow([], [Action(Kind.W, layers - 1)], layers - 1)


def exposed(profile: Profile, link: Link, order: Order) -> float:
    """The least exposed time on a link that can be interrupted: for every layer m and every time, what layers
    0 to m have not yet made must fit between that time and the forward of m.
    """
    ready, backward = gradient_times(profile, order)
    found, below = 0.0, 0.0
    for m, layer in enumerate(profile.layers):
        for time in ready[: m + 1]:
            later = sum(2 * link.beta * profile.sizes[j] for j in range(m + 1) if ready[j] >= time)
            found = max(found, time + later - backward - below)
        below += layer.forward
    return found


def best_of_all(profile: Profile, link: Link) -> float:
    return min(exposed(profile, link, order) for order in every_backward(len(profile.layers)))


CASES = [(seed, alike) for seed in range(12) for alike in (False, True)]


@pytest.mark.parametrize(("seed", "alike"), CASES)
def test_no_order_beats_the_bound_and_the_search_finds_the_best(seed: int, alike: bool) -> None:
    profile, link = model(4, seed, alike)
    best = best_of_all(profile, link)
    assert max(split_exposed(profile, link), fluid_exposed(profile, link)) <= best + 1e-9
    found = min(exposed(profile, link, order) for order in backward_orders(profile, link))
    assert found == pytest.approx(best, abs=1e-9)


def test_the_bound_is_often_reached() -> None:
    """With four layers an order that suits one layer spoils another's, which the bound sees in part only."""
    gaps = []
    for seed, alike in CASES:
        profile, link = model(4, seed, alike)
        gaps.append((profile.compute + best_of_all(profile, link)) / split_bound(profile, link))
    assert sum(gap < 1 + 1e-9 for gap in gaps) >= len(gaps) / 3


@pytest.mark.parametrize("seed", range(20))
def test_makespans_are_the_shortest(seed: int) -> None:
    """Of layers 0 to m alone: the flow shop with the tree of precedences, against every order."""
    profile, link = model(4, seed)
    parts = Parts.of(profile, link)
    for m, found in enumerate(_makespans(parts)):
        best = float("inf")
        for order in every_backward(m + 1):
            compute = wire = 0.0
            for action in order:
                weight = action.kind is Kind.W
                compute += float((parts.weights if weight else parts.inputs)[action.index])
                wire = max(wire, compute) + (float(parts.wire[action.index]) if weight else 0.0)
            best = min(best, max(wire, 0.0))
        assert found == pytest.approx(best, rel=1e-9)


def test_by_hand() -> None:
    """Two layers, a second for each part. Layer 0 sends 3 s: only W1 and no forward can hide any of it."""
    rows = (Layer("a", 1, 1, 3, 0, 1), Layer("b", 1, 2, 0, 0, 1))
    profile, link = Profile("two", rows), Link(0.0, 0.5)
    assert lower_bound(profile, link) == 5 + 3
    profile = Profile("two", (rows[0], Layer("b", 1, 2, 1, 0, 1)))
    assert split_bound(profile, link) == pytest.approx(5 + 2)  # B1 W0 W1
    assert lower_bound(profile, link) == 5 + 3


@given(st.integers(0, 10**6), st.floats(0.0, 0.1), st.sampled_from(["gradients", "parameters"]), st.data())
@settings(max_examples=60, deadline=None)
def test_the_fast_model_is_the_simulator(seed: int, alpha: float, gather: str, data: st.DataObject) -> None:
    profile, link = model(5, seed)
    link = Link(alpha, link.beta)
    orders = list(itertools.islice(every_backward(5), data.draw(st.integers(0, 3000)), None, 977))
    sizes = fuse_by_bytes(profile.sizes, data.draw(st.sampled_from([1, 3000, 9000])))
    for order in orders[:3]:
        problem = Problem(profile, link, gather, early_step=gather == "parameters", backward=order)
        jobs = [Action(kind, b) for b in range(len(sizes)) for kind in (Kind.RS, Kind.AG)]
        program = problem.program("drawn", sizes, _shuffled(jobs, seed))
        validate(program, profile)
        assert problem.period(program) == pytest.approx(simulate(program, profile, link).period, rel=1e-9)
        assert Program.from_dict(program.to_dict()) == program and program.backward == order


def _shuffled(jobs: Sequence[Action], seed: int) -> list[Action]:
    """In any order with every RS before its AG."""
    order = list(jobs)
    random.Random(seed).shuffle(order)
    reduces = iter(sorted((a for a in order if a.kind is Kind.RS), key=order.index))
    order.sort(key=lambda action: action.kind is Kind.AG)
    return [*reduces, *(action for action in order if action.kind is Kind.AG)]


@pytest.mark.parametrize("extra", [0, 250, 1000, None])
def test_waiting_weight_gradients_hold_no_more_than_they_may(extra: int | None) -> None:
    """A layer's input is held until its W has run, the gradient of its output between its B and its W."""
    profile, link = model(6, 3, kept=200)
    orders = backward_orders(profile, link, extra)
    most = []
    for order in orders:
        held, peak, ran = 6 * 200, 0, set()
        for action in order:
            first = action.index not in ran
            ran.add(action.index)
            if first and action.kind is Kind.B:
                held += 200
            elif not first:
                held -= 200 if action.kind is Kind.B else 400
            peak = max(peak, held)
        most.append(peak)
    assert orders and (extra is None or max(most) <= 6 * 200 + extra)


def test_a_plan_is_split_only_where_it_gains() -> None:
    profile = profiles.shipped("bert_base")

    def period(ratio: float, **options: bool) -> tuple[float, Program]:
        link = Link(0.0, ratio * profile.compute / (2 * profile.total_bytes))
        plan = policies.plan(profile, link, "optimal", budget=200_000, **options)
        validate(plan, profile)
        return simulate(plan, profile, link).period / profile.compute, plan

    assert period(0.75)[0] > 1.16
    split, plan = period(0.75, split_backward=True)
    assert split < 1.02 and plan.backward
    assert not period(0.01, split_backward=True)[1].backward


def test_the_order_of_a_backward_is_written_and_read() -> None:
    order = parse_actions("B2 W1 W2 B1 B0 W0")
    profile, link = model(3, 0)
    program = Problem(profile, link, backward=order).program("hand", fuse_by_bytes(profile.sizes, 1), ())
    assert program.backward == order
