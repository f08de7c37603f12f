"""The validator: what is wrong, where, and how it is shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ir.actions import Action, Kind, parse_actions
from scheduler.ir.buckets import Bucket, Piece, one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program, data_parallel_program
from scheduler.simulate.costs import peak_memory
from scheduler.simulate.simulator import simulate
from scheduler.validate import InvalidProgram, grid, validate, violations

FOUR = Profile("four", tuple(Layer(f"l{i}", 1.0, 2.0, 10, activation_bytes=100) for i in range(4)))
BUCKETS = one_per_layer(FOUR.sizes)


def program(order: str, **options: Any) -> Program:
    return data_parallel_program("test", options.pop("buckets", BUCKETS), parse_actions(order), 4, **options)


def lanes(compute: str = "B3 B2 B1 B0 F0+1 F1+1 F2+1 F3+1", **links: str) -> dict[str, Any]:
    return {"compute": parse_actions(compute), **{name: parse_actions(text) for name, text in links.items()}}


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0", {}),
        ("RS0 AG0 RS1 AG1 RS2 AG2 RS3 AG3", {}),
        ("AR0 AR1 AR2 AR3", {}),
        ("AR0 RS1 AR2 AG1 AR3", {}),
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0", {"gather": "parameters"}),
        ("RS0 AG0 RS1 AG1 RS2 AG2 RS3 AG3", {"gather": "parameters", "early_step": True}),
    ],
)
def test_valid(order: str, options: dict[str, Any]) -> None:
    validate(program(order, **options), FOUR)
    validate(program(order, **options))


def test_valid_in_other_forms() -> None:
    rotated = lanes("F0 F1 F2 F3 B3 B2 B1 B0", link="AG3-1 AG2-1 AG1-1 AG0-1 RS0 RS1 RS2 RS3")
    two = lanes(one="RS0 RS1 AG1 AG0", two="RS2 RS3 AG3 AG2")
    for kernel in (rotated, two):
        validate(Program("test", BUCKETS, (kernel,), 4), FOUR)
    validate(Program("test", BUCKETS, (rotated, rotated), 4, ranks=2), FOUR)


def test_gather_before_its_reduction_is_shown() -> None:
    with pytest.raises(InvalidProgram) as error:
        validate(program("RS0 RS1 AG3 RS2 RS3 AG2 AG1 AG0"))
    assert str(error.value) == (
        "AG3 stands before RS3 and gathers what is not reduced yet\n"
        "  rank 0 link | RS0 RS1 >AG3< RS2 >RS3< AG2 AG1 AG0"
    )


def test_gather_before_the_step_is_shown() -> None:
    (problem,) = violations(program("RS0 RS1 AG0 RS2 RS3 AG3 AG2 AG1", gather="parameters"))
    assert problem.rule == "step"
    assert problem.places == {(0, "link", 2), (0, "link", 4)}


@pytest.mark.parametrize(
    ("order", "options", "rule", "message"),
    [
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1", {}, "once", "rank 0 never does AG0"),
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0 AG0", {}, "once", "AG0 stands 2 times"),
        ("AR0 RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0", {}, "once", "RS0 does not belong to rank 0"),
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0 RS4", {}, "once", "RS4 does not belong to rank 0"),
        ("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0 0SENDF1>1", {}, "once", "0SENDF1>1 does not belong"),
        ("AR0 RS1 RS2 RS3 AG3 AG2 AG1", {"gather": "parameters"}, "once", "AR0 gathers gradients"),
        ("RS0 RS1 RS2 RS3 AG0-1 AG3 AG2 AG1", {}, "deadlock", "F3.1 of rank 0 waits for AG0-1"),
        ("AR0 AR1 AR2", {"buckets": BUCKETS[:3]}, "cover", "cover 0 of the 10 bytes of layer 0"),
        (
            "AR0 AR1 AR2 AR3 AR4",
            {"buckets": (*BUCKETS, Bucket((Piece(2, 0, 10),)))},
            "cover",
            "bytes 0..10 of layer 2 stand twice",
        ),
        (
            "AR0 AR1 AR2 AR3",
            {"buckets": (*BUCKETS[:3], Bucket((Piece(0, 0, 10),), group=1))},
            "cover",
            "bucket 3 is of group 1 and holds layer 0 of group 0",
        ),
    ],
)
def test_broken_rule(order: str, options: dict[str, Any], rule: str, message: str) -> None:
    found = violations(program(order, **options), FOUR)
    assert rule in {problem.rule for problem in found}
    with pytest.raises(InvalidProgram, match=message):
        validate(program(order, **options), FOUR)


def test_compute_against_its_data_deadlocks() -> None:
    kernel = lanes("B3 B1 B2 B0 F0+1 F1+1 F2+1 F3+1", link="AR0 AR1 AR2 AR3")
    (problem,) = violations(Program("test", BUCKETS, (kernel,), 4), FOUR)
    assert problem.rule == "deadlock"
    assert (0, "compute", 1) in problem.places
    assert ">B1< >B2<" in grid(Program("test", BUCKETS, (kernel,), 4), problem.places)


def test_deadlock_across_two_links() -> None:
    """Each lane is in order by itself; together the AG in front of each waits for the RS behind the other."""
    kernel = lanes(one="AG1 RS0 AG2 AG3", two="AG0 RS1 RS2 RS3")
    found = violations(Program("test", BUCKETS, (kernel,), 4), FOUR)
    assert {problem.rule for problem in found} == {"deadlock"}
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(Program("test", BUCKETS, (kernel,), 4), FOUR, Link(0.0, 1.0))


def test_ranks_in_different_orders_are_named() -> None:
    first = lanes(link="RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0")
    other = lanes(link="RS0 RS1 RS2 RS3 AG2 AG3 AG1 AG0")
    with pytest.raises(InvalidProgram) as error:
        validate(Program("test", BUCKETS, (first, first, other), 4, ranks=3))
    assert str(error.value) == (
        "collective 4 of lane 'link' is AG3 on rank 0 and AG2 on rank 2;"
        " the ranks of a group must have one order\n"
        "  rank 0 link | RS0 RS1 RS2 RS3 >AG3< AG2 AG1 AG0\n"
        "  rank 2 link | RS0 RS1 RS2 RS3 >AG2< AG3 AG1 AG0"
    )


def test_rank_without_a_collective_is_named() -> None:
    first = lanes(link="AR0 AR1 AR2 AR3")
    other = lanes(link="AR0 AR1 AR2 AR3", second="")
    assert violations(Program("test", BUCKETS, (first, other), 4, ranks=2)) == []
    split = lanes(link="AR0 AR1 AR2", second="AR3")
    (problem, *_) = violations(Program("test", BUCKETS, (first, split), 4, ranks=2))
    assert problem.rule == "one order"


def test_plan_for_another_model() -> None:
    with pytest.raises(InvalidProgram, match="model of 4 layers, profile 'three' has 3"):
        validate(program("AR0 AR1 AR2 AR3"), Profile("three", FOUR.layers[:3]))


def test_long_programs_are_cut_around_the_fault() -> None:
    profile = Profile("many", FOUR.layers * 25)
    order = [Action(Kind.AR, i) for i in range(100)] + [Action(Kind.AR, 60)]
    (problem,) = violations(data_parallel_program("x", one_per_layer(profile.sizes), order, 100), profile)
    assert grid(data_parallel_program("x", one_per_layer(profile.sizes), order, 100), problem.places) == (
        "  rank 0 link | ... AR56 AR57 AR58 AR59 >AR60< AR61 AR62 AR63 AR64 AR65 AR66 AR67 AR68 AR69 AR70"
        " AR71 AR72 ...\n"
    )


@given(st.permutations([f"{kind}{b}" for kind in ("RS", "AG") for b in range(4)]))
def test_any_order_is_valid_just_if_each_gather_is_behind_its_reduction(order: list[str]) -> None:
    made = program(" ".join(order))
    right = all(order.index(f"RS{b}") < order.index(f"AG{b}") for b in range(4))
    assert (violations(made, FOUR) == []) == right
    if right:
        assert simulate(made, FOUR, Link(0.1, 0.1)).settled


def test_peak_memory_by_hand() -> None:
    """Four layers of 100 bytes of activations and 10 of gradients, and 40 bytes of parameters.

    The worst moment is the start of the backward (400 + 10): each layer then frees more than it makes.
    """
    assert peak_memory(program("AR0 AR1 AR2 AR3"), FOUR) == 40 + 410
    heavy = Profile("heavy", tuple(Layer(f"l{i}", 1.0, 2.0, 10, activation_bytes=1) for i in range(4)))
    # Here gradients outweigh activations: all four and the last activation, at the end of the backward.
    assert peak_memory(program("AR0 AR1 AR2 AR3"), heavy) == 40 + 41
