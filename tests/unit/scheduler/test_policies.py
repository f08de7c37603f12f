"""The published policies: literal programs that can be checked by hand, and what must hold for any model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import policies
from scheduler.bounds import lower_bound
from scheduler.ir.actions import Kind, parse_actions
from scheduler.ir.buckets import Bucket, Piece, one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.policies.problem import MIB, Problem
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate
from tests.support.scheduling_problems import links, make_profile, profiles

# Four layers of 2 bytes, 1 s of forward and 3 s of backward each; RS = AG = 0.5 + 2 = 2.5 s. Buckets 0..3
# hold
# layers 3..0 and are ready at 3, 6, 9 and 12 s. A link as busy as the compute: hardly any gaps in the
# backward.
BUSY = make_profile([2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 3])
# The same with 1, 2, 1, 1 bytes: RS = AG = 1.5 s (bucket 2: 2.5 s), so that an AG fits behind an RS.
GAPS = make_profile([1, 2, 1, 1], [1, 1, 1, 1], [3, 3, 3, 3])
LINK = Link(0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "plan", "period"),
    [
        # Everything between the end of the backward, 12, and of the last AG, 32.
        ("sequential", "RS3 RS2 RS1 RS0 AG0 AG1 AG2 AG3", 36.0),
        # All-reduces of 5 s from 3 to 23 without a pause, then the whole forward.
        ("wfbp", "AR0 AR1 AR2 AR3", 27.0),
        # As AR1 ends, at 13, layers 1 and 0 are ready: layer 0 goes first, F0 and F1 run until 24.
        ("bytescheduler", "AR0 AR1 AR3 AR2", 26.0),
        # The last RS ends at 14.5; AGs end at 17, 19.5, 22 and 24.5, each just before its forward.
        ("dear", "RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0", 25.5),
        # No pause is longer than a start-up; only AG2 (2.5 s) is shorter than its slack (F1 to F3 wait 4.5
        # s).
        ("pipedap", "RS0 RS1 RS2 RS3 AG2 AG3 AG1 AG0", 25.5),
        # AG1 delays RS2 by 2 s and RS3 by 1.5 s; but F2 then waits for nothing, and the last AG ends at 23.5.
        ("optimal", "RS0 RS1 AG1 RS2 RS3 AG3 AG2 AG0", 24.5),
    ],
)
def test_literal_programs_of_a_busy_link(name: str, plan: str, period: float) -> None:
    program = policies.plan(BUSY, LINK, name, buckets=one_per_layer(BUSY.sizes))
    assert program.plan == plan
    assert simulate(program, BUSY, LINK).period == pytest.approx(period)


@pytest.mark.parametrize(
    ("name", "plan", "period"),
    [
        ("wfbp", "AR0 AR1 AR2 AR3", 21.0),
        # RS end at 4.5, 7.5, 11.5, 13.5; AGs at 15, 17.5, 19, 20.5: F3 waits for the last.
        ("dear", "RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0", 21.5),
        # AG0 and AG1 fill the pauses before RS1 and RS2; AG2 would make AG3 late. F1 waits until 18.5 - 1.
        ("pipedap", "RS0 AG0 RS1 AG1 RS2 RS3 AG3 AG2", 20.5),
    ],
)
def test_literal_programs_with_gaps(name: str, plan: str, period: float) -> None:
    program = policies.plan(GAPS, LINK, name, buckets=one_per_layer(GAPS.sizes))
    assert program.plan == plan
    assert simulate(program, GAPS, LINK).period == pytest.approx(period)


def test_mgwfbp_merges_what_is_ready_within_a_startup() -> None:
    """AR(3) runs from 3 to 8, AR(2) from 8 to 13; layer 0 is ready at 12, before AR(1) could start at 13."""
    program = policies.plan(BUSY, LINK, "mgwfbp")
    assert [bucket.layers for bucket in program.buckets] == [(3,), (2,), (0, 1)]
    assert program.plan == "AR0 AR1 AR2"


def test_mgwfbp_waits_less_than_one_startup() -> None:
    profile = make_profile([1, 1], [0, 0], [1, 1])
    assert len(policies.plan(profile, Link(0.4, 0.0), "mgwfbp").buckets) == 2
    assert len(policies.plan(profile, Link(0.6, 0.0), "mgwfbp").buckets) == 1


def test_bytescheduler_cuts_tensors_and_lets_later_layers_overtake() -> None:
    """Layer 1 in four parts of 2 s each; layer 0 is ready while the second travels and goes before the
    third."""
    profile = make_profile([64, 256], [1, 1], [3, 1])
    program = policies.plan(profile, Link(0.0, 1 / 64), "bytescheduler", bucket_bytes=64)
    assert [bucket.pieces for bucket in program.buckets] == [
        (Piece(1, 0, 64),),
        (Piece(1, 64, 128),),
        (Piece(1, 128, 192),),
        (Piece(1, 192, 256),),
        (Piece(0, 0, 64),),
    ]
    assert program.plan == "AR0 AR1 AR4 AR2 AR3"


def test_wfbp_starts_with_a_small_bucket() -> None:
    profile = make_profile([30 * MIB, 20 * MIB, 10 * MIB, MIB], [1] * 4, [1] * 4)
    program = policies.plan(profile, LINK, "wfbp")
    assert [bucket.layers for bucket in program.buckets] == [(3,), (1, 2), (0,)]


def test_sequential_overlaps_nothing() -> None:
    result = simulate(policies.plan(BUSY, LINK, "sequential"), BUSY, LINK)
    assert result.period == pytest.approx(BUSY.compute + 2 * LINK.cost(Kind.RS, 8))


def test_policies_that_tune_choose_the_best_size() -> None:
    """Without start-up cost small buckets are best; with a large one, few are."""
    profile = make_profile([8 * MIB] * 8, [1] * 8, [2] * 8)
    for name in ("dear", "pipedap"):
        free = policies.plan(profile, Link(0.0, 1 / MIB), name)
        dear = policies.plan(profile, Link(100.0, 1 / MIB), name)
        assert len(free.buckets) == 8 and len(dear.buckets) == 1, name


def test_groups_do_not_share_buckets() -> None:
    profile = make_profile([10, 20, 30, 40], [1] * 4, [1] * 4)
    layers = tuple(
        type(layer)(layer.name, 1, 1, layer.bytes, group=n % 2) for n, layer in enumerate(profile.layers)
    )
    profile = Profile("two groups", layers)
    for name in policies.names():
        for bucket in policies.plan(profile, LINK, name).buckets:
            assert {layer % 2 for layer in bucket.layers} == {bucket.group}, name


STEPS: list[dict[str, Any]] = [
    {},
    {"gather": "parameters"},
    {"gather": "parameters", "early_step": True, "ranks": 4},
]
ALL_REDUCE = ("wfbp", "mgwfbp", "bytescheduler")


@pytest.mark.few
@pytest.mark.parametrize("name", policies.names())
@pytest.mark.parametrize("step", STEPS, ids=["gradients", "late", "early"])
@settings(max_examples=10, deadline=None)
@given(profile=profiles(groups=2), link=links(), bucket_bytes=st.sampled_from([None, 100, 10_000]))
def test_any_profile_gives_a_valid_program(
    name: str, step: dict[str, Any], profile: Profile, link: Link, bucket_bytes: int | None
) -> None:
    if step and name in ALL_REDUCE:
        with pytest.raises(ValueError, match=f"{name}.*all-reduces.*dear"):
            policies.plan(profile, link, name, **step)
        return
    options = {"budget": 20_000} if name == "optimal" else {}
    program = policies.plan(profile, link, name, bucket_bytes=bucket_bytes, **step, **options)
    validate(program, profile)
    assert Program.from_dict(program.to_dict()) == program
    assert parse_actions(program.plan) == program.link
    period = simulate(program, profile, link).period
    assert period == pytest.approx(Problem(profile, link, **step).period(program), rel=1e-9, abs=1e-12)
    assert period >= lower_bound(profile, link, **step) * (1 - 1e-9)
    assert period <= sequential_seconds(program, profile, link) * (1 + 1e-9)


def sequential_seconds(program: Program, profile: Profile, link: Link) -> float:
    """One thing after the other: all compute, all collectives, all updates."""
    wires = sum(link.cost(action.kind, program.buckets[action.index].bytes) for action in program.link)
    ranks = program.ranks if program.gather == "parameters" else 1
    return profile.compute + wires + profile.update_per_byte * profile.total_bytes / ranks


@pytest.mark.parametrize("name", [name for name in policies.names() if name != "mgwfbp"])
def test_takes_the_callers_buckets_in_any_order(name: str) -> None:
    buckets = one_per_layer(GAPS.sizes)
    program = policies.plan(GAPS, LINK, name, buckets=buckets)
    turned = policies.plan(GAPS, LINK, name, buckets=buckets[::-1])
    renamed = [(action.kind, 3 - action.index) for action in turned.link]
    assert [(action.kind, action.index) for action in program.link] == renamed


@pytest.mark.parametrize("name", policies.names())
def test_buckets_of_another_model_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="layer 4; the profile has 4 layers"):
        policies.plan(GAPS, LINK, name, buckets=[Bucket((Piece(4, 0, 1),))])
    with pytest.raises(ValueError, match="cover 0 of the 1 bytes of layer 0"):
        policies.plan(GAPS, LINK, name, buckets=[])
    with pytest.raises(ValueError, match="bucket 0 is of group 1 and holds layer 3 of group 0"):
        policies.plan(GAPS, LINK, name, buckets=[Bucket(b.pieces, 1) for b in one_per_layer(GAPS.sizes)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "weights"}, "gather must be 'gradients' or 'parameters', got 'weights'"),
        ({"early_step": True}, "early_step needs gather='parameters'"),
        ({"bucket_bytes": 0}, "bucket sizes must be positive, got limit=0"),
        ({"bucket_bytes": -5}, "bucket sizes must be positive, got limit=-5"),
    ],
)
@pytest.mark.parametrize("name", ["dear", "optimal"])
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policies.plan(GAPS, LINK, name, **options)


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ValueError, match="no policy 'fastest'; the policies are .*optimal"):
        policies.plan(GAPS, LINK, "fastest")
    assert policies.get("PipeDAP") is policies.get("pipedap")
    assert policies.get("MG-WFBP") is policies.get("mgwfbp")


def test_a_policy_of_ones_own() -> None:
    def mine(profile: Profile, link: Link, **options: Any) -> Program:
        return policies.plan(profile, link, "dear", **options)

    policies.register("my_own", mine)
    try:
        for name in ("my_own", "My-Own"):
            assert policies.plan(GAPS, LINK, name).plan == policies.plan(GAPS, LINK, "dear").plan
        with pytest.raises(ValueError, match="'myown' exists already"):
            policies.register("myown", mine)
    finally:
        policies._ADDED.pop("my_own")
