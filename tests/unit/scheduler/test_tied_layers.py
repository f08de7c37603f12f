"""Two layers hold parts of one gradient: the later one's is sent early, and both are needed by the first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import policies
from scheduler.ir.actions import Action, Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.policies.problem import Problem
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

LINK = Link(0.001, 1e-9)
OUTSIDE = Layer("outside", 0.001, 0.0, 0)


def transformer(corrections: int, head: int, blocks: int = 3, compute: float = 0.02) -> Profile:
    """An embedding, a few blocks, and a head whose weight is the embedding's."""
    middle = [Layer(f"block{i}", compute / 3, 2 * compute / 3, 3_000_000, group=0) for i in range(blocks)]
    return Profile(
        "tied",
        (
            OUTSIDE,
            Layer("embedding", 0.001, 0.001, corrections, group=1),
            *middle,
            Layer("head", compute / 3, 2 * compute / 3, head, needed_by=1),
        ),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2_000_000),
    st.integers(1, 20_000_000),
    st.integers(1, 4),
    st.sampled_from(policies.names()),
)
def test_any_policy_gathers_corrections_behind_what_they_correct(
    corrections: int, head: int, blocks: int, policy: str
) -> None:
    profile = transformer(corrections, head, blocks)
    options = {"budget": 20_000} if policy == "optimal" else {}
    program = policies.plan(profile, LINK, policy, **options)
    if all(len(profile.layers) - 1 not in bucket.layers for bucket in program.buckets):
        profile = profile.whole()
        assert policy == "optimal"
    validate(program, profile)
    if not any(layer.needed_by >= 0 for layer in profile.layers):
        return
    last = len(profile.layers) - 1
    gathers = [program.buckets[a.index].layers for a in program.link if a.kind is not Kind.RS]
    first = next(place for place, layers in enumerate(gathers) if 1 in layers)
    assert all(last not in layers for layers in gathers[first + 1 :])
    assert simulate(program, profile, LINK).period == pytest.approx(Problem(profile, LINK).period(program))


def test_the_first_forward_waits_for_the_head() -> None:
    """Its gradients are as urgent as the embedding's own: no other layer's forward can hide them."""
    tied = transformer(64, 20_000_000, blocks=1, compute=0.0)
    layers = list(tied.layers)
    layers[2] = replace(layers[2], forward=1.0, bytes=0)
    tied = replace(tied, layers=tuple(layers))
    apart = replace(tied, layers=(*layers[:-1], replace(layers[-1], needed_by=-1)))
    problem = Problem(apart, LINK)
    program = problem.program("by hand", problem.fuse(None), [Action(Kind.AR, 1), Action(Kind.AR, 0)])
    assert program.buckets[1].layers == (1,)
    assert simulate(program, apart, LINK).exposed < 0.003
    assert simulate(program, tied, LINK).exposed > 2 * LINK.beta * 20_000_000


def test_a_head_that_is_sent_early_hides_more() -> None:
    """A tied gradient of 20 MB that is whole at the end of the backward, and the same with its head apart."""
    apart = transformer(400_000, 20_000_000, compute=0.03)
    early, late = (Problem(p, LINK).period(policies.plan(p, LINK, "optimal")) for p in (apart, apart.whole()))
    assert early < 0.9 * late


@pytest.mark.thorough
def test_a_head_that_gains_nothing_waits_for_the_whole_gradient() -> None:
    """Corrections are as large as the gradient itself: sent whole, it takes half of the link's time."""
    apart = transformer(20_000_000, 20_000_000)
    program = policies.plan(apart, LINK, "optimal")
    assert all(5 not in bucket.layers for bucket in program.buckets)
    validate(program, apart.whole())
    assert [layer.bytes for layer in apart.whole().layers] == [0, 20_000_000, *[3_000_000] * 3, 0]


@pytest.mark.parametrize("wrong", [5, 6, -2])
def test_only_an_earlier_layer_can_need_a_gradient(wrong: int) -> None:
    layers = transformer(64, 64).layers
    with pytest.raises(ValueError, match="needed_by must name a layer before this one, which is layer 5"):
        Profile("wrong", (*layers[:-1], replace(layers[-1], needed_by=wrong)))


def test_a_profile_keeps_who_needs_a_gradient(tmp_path: object) -> None:
    profile = transformer(64, 64)
    assert Profile.from_dict(profile.to_dict()) == profile
    assert profile.needed == (0, 1, 2, 3, 4, 1)
