"""Valid programs pass; each way to break one is caught, with the action named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.ir.actions import Action, Kind, parse_action
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.pipelines import generate
from scheduler.validate import InvalidProgram, Violation, validate, violations

PLACEMENTS = ["eager", "bubble"]
Edit = Callable[[list[Action]], None]


def edited(program: Program, rank: int, lane: str, edit: Edit) -> Program:
    """The program with one rank's lane changed."""
    kernel = [{name: list(actions) for name, actions in lanes.items()} for lanes in program.kernel]
    edit(kernel[rank][lane])
    frozen = tuple({name: tuple(actions) for name, actions in lanes.items()} for lanes in kernel)
    return replace(program, kernel=frozen)


def swap(one: str, other: str) -> Edit:
    def edit(lane: list[Action]) -> None:
        a, b = (lane.index(parse_action(text)) for text in (one, other))
        lane[a], lane[b] = lane[b], lane[a]

    return edit


def drop(text: str) -> Edit:
    return lambda lane: lane.remove(parse_action(text))


def put(old: str, new: str) -> Edit:
    def edit(lane: list[Action]) -> None:
        lane[lane.index(parse_action(old))] = parse_action(new)

    return edit


def only(program: Program, rule: str) -> Violation:
    found = violations(program)
    assert {problem.rule for problem in found} == {rule}, [problem.message for problem in found]
    return found[0]


@pytest.mark.parametrize(
    "schedule",
    ["gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream", "2bw", "wpipe", "ashpipe", "bundle"],
)
@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 1), (3, 5)])
def test_generated_programs_are_valid(schedule: str, stages: int, count: int) -> None:
    if schedule in ("ashpipe", "bundle"):
        stages, count = min(stages, 2), 1
    for replicas, placement in ((1, "bubble"), *((2, placement) for placement in PLACEMENTS)):
        program = generate(schedule, stages, count, replicas=replicas, placement=placement)
        validate(program)
        assert Program.from_dict(program.to_dict()) == program


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unequal_replicas_are_valid(placement: str) -> None:
    validate(generate("ashpipe", 3, replicas=[4, 3, 1], placement=placement))
    validate(generate("1f1b", 3, 4, replicas=[1, 3, 2], placement=placement))


# Mutations


def test_swapped_sends() -> None:
    broken = edited(generate("gpipe", 2, 2), 0, "link", swap("0SENDF0>1", "0SENDF1>1"))
    problem = only(broken, "messages")
    assert "0SENDF1>1 in another order than rank 1 receives 1RECVF1<0" in problem.message
    assert problem.places == {(0, "link", 0), (1, "recv", 1)}


def test_swapped_sends_in_an_endless_pipeline() -> None:
    program = generate("2bw", 3, 3)
    one, other = (
        action for action in program.kernel[1]["link"] if action.kind is Kind.SENDB and action.index < 2
    )
    broken = edited(program, 1, "link", swap(str(one), str(other)))
    assert "SENDB" in only(broken, "messages").message


def test_stale_backward() -> None:
    broken = edited(generate("pipedream", 3), 0, "compute", put("0B0@-2", "0B0@-1"))
    problem = only(broken, "version")
    assert problem.message.startswith("0B0@-1 sees other weights than its forward 0F0@-2")
    assert problem.places == {(0, "compute", 0), (0, "compute", 1)}


def test_forward_of_a_version_not_made_yet() -> None:
    def edit(lane: list[Action]) -> None:
        put("0F0@-2+2", "0F0@-1+2")(lane)
        put("0B0@-2", "0B0@-1")(lane)

    problem = only(edited(generate("pipedream", 3), 0, "compute", edit), "order")
    assert problem.message.startswith("0F0@-1+2 uses a version that 0STEP makes only later")
    assert "at most -2" in problem.message


@pytest.mark.parametrize("missing", ["0RS1", "0AG1"])
def test_missing_collective(missing: str) -> None:
    broken = edited(generate("1f1b", 2, 2, replicas=2), 1, "link", drop(missing))
    assert only(broken, "once").message == f"rank 1 never does {missing}; every period needs it once"


@pytest.mark.parametrize(
    ("rank", "lane", "missing"),
    [
        (0, "compute", "0F1"),
        (1, "compute", "1B0"),
        (0, "compute", "0STEP"),
        (0, "link", "0SENDF1>1"),
        (1, "link", "1SENDB0>0"),
        (1, "recv", "1RECVF0<0"),
        (0, "recv", "0RECVB1<1"),
    ],
)
def test_missing_action(rank: int, lane: str, missing: str) -> None:
    broken = edited(generate("gpipe", 2, 2), rank, lane, drop(missing))
    assert only(broken, "once").message == f"rank {rank} never does {missing}; every period needs it once"


@pytest.mark.parametrize(
    ("schedule", "count", "placement"),
    [("1f1b", 2, "bubble"), ("zero_bubble", 2, "eager"), ("pipedream", 1, "bubble"), ("wpipe", 1, "bubble")],
)
def test_any_missing_action_or_other_version_is_caught(schedule: str, count: int, placement: str) -> None:
    """Every action of one rank of each stage, one at a time."""
    program = generate(schedule, 2, count, replicas=2, placement=placement)
    for rank in (0, 3):
        for lane, actions in program.kernel[rank].items():
            for action in actions:
                found = violations(edited(program, rank, lane, drop(str(action))))
                assert any(str(replace(action, version=None, shift=0)) in p.message for p in found), action
                if lane == "compute" and action.kind is not Kind.STEP:
                    older = str(replace(action, version=(action.version or 0) - 1))
                    found = violations(edited(program, rank, lane, put(str(action), older)))
                    assert any(older in problem.message for problem in found), older


def test_action_twice_or_foreign() -> None:
    program = generate("gpipe", 2, 2)
    twice = edited(program, 0, "compute", lambda lane: lane.append(parse_action("0B1")))
    assert only(twice, "once").message == "0B1 stands 2 times; a period does it once"
    foreign = edited(program, 0, "compute", lambda lane: lane.append(parse_action("1B1")))
    assert only(foreign, "once").message == "1B1 does not belong to rank 0 of this program"
    astray = edited(program, 0, "link", lambda lane: lane.append(parse_action("0B1")))
    astray = edited(astray, 0, "compute", drop("0B1"))
    assert only(astray, "once").message == "0B1 does not belong in lane 'link'"


def test_crossed_collectives() -> None:
    """Two buckets of stage 0, reduced in another order by its second replica."""
    profile = Profile("two", tuple(Layer(str(layer), 1.0, 2.0, 256) for layer in range(4)))
    program = generate("1f1b", 2, 2, replicas=2, profile=profile, cuts=(0, 2), bucket_bytes=256)
    validate(program, profile)
    problem = only(edited(program, 1, "link", swap("0RS1", "0RS2")), "one order")
    assert problem.message.endswith(
        "is 0RS1 on rank 0 and 0RS2 on rank 1; the ranks of a group must have one order"
    )
    assert problem.places == {
        (0, "link", list(map(str, program.kernel[0]["link"])).index("0RS1")),
        (1, "link", list(map(str, program.kernel[0]["link"])).index("0RS1")),
    }


def test_gather_before_its_reduction() -> None:
    program = generate("1f1b", 2, 2, replicas=2)
    for rank in (0, 1):
        program = edited(program, rank, "link", swap("0RS1", "0AG1"))
    assert "0AG1 stands before 0RS1" in only(program, "order").message


def test_step_before_the_gradient_is_complete() -> None:
    problem = only(edited(generate("gpipe", 2, 2), 1, "compute", swap("1B1", "1STEP")), "order")
    assert problem.message == "1STEP stands before 1B1, which it needs"


def test_replicas_of_two_versions() -> None:
    program = generate("2bw", 2, 2, replicas=2)

    def edit(lane: list[Action]) -> None:
        lane[:] = [replace(action, version=-2) if action.version else action for action in lane]

    program = edited(program, 1, "compute", edit)
    assert "gradients of two versions" in only(program, "version").message


def test_deadlock_names_the_actions() -> None:
    """Rank 0 waits for a backward before it sends the forward that this backward needs."""
    problem = only(edited(generate("1f1b", 2, 2), 0, "compute", swap("0F0", "0B0")), "deadlock")
    assert "0B0 of rank 0" in problem.message
    assert (0, "compute", 0) in problem.places


def test_deadlock_between_two_ranks() -> None:
    """Each order is fine alone: rank 1 wants micro-batch 1 first, and only sends it back in that order."""
    program = generate("1f1b", 2, 3)

    def edit(lane: list[Action]) -> None:
        lane[:] = [parse_action(text) for text in "1F0 1F1 1F2 1B0 1B1 1B2 1STEP".split()]

    assert "of rank 0" in only(edited(program, 1, "compute", edit), "deadlock").message


def test_more_kept_than_declared() -> None:
    program = generate("pipedream", 3)
    layout = program.pipeline
    assert layout is not None
    fewer = replace(program, pipeline=replace(layout, versions=(2, 2, 1)))
    assert only(fewer, "memory").message == "stage 0 keeps 3 weight versions at once, 2 are declared"
    fewer = replace(program, pipeline=replace(layout, activations=(3, 1, 1)))
    assert only(fewer, "memory").message == (
        "stage 1 keeps 2 micro-batches' activations at once, 1 are declared"
    )


def test_more_bytes_than_declared() -> None:
    profile = Profile("two", (Layer("a", 1, 2, 100, 10), Layer("b", 1, 2, 100, 10)))
    validate(generate("gpipe", 2, 3, profile=profile, memory=230), profile)
    with pytest.raises(InvalidProgram, match="rank 0 needs 230 bytes, 229 are declared"):
        validate(generate("gpipe", 2, 3, profile=profile, memory=[229, 230]), profile)


def test_plan_for_another_model() -> None:
    profile = Profile("two", (Layer("a", 1, 2, 4), Layer("b", 1, 2, 4)))
    program = generate("gpipe", 2, 2, profile=profile)
    other = Profile("three", (*profile.layers, Layer("c", 1, 2, 4)))
    with pytest.raises(InvalidProgram, match="for a model of 2 layers, profile 'three' has 3"):
        validate(program, other)


def test_bucket_of_two_stages() -> None:
    profile = Profile("two", (Layer("a", 1, 2, 256), Layer("b", 1, 2, 256)))
    program = generate("1f1b", 1, 2, profile=profile, cuts=(0,), replicas=2)
    layout = program.pipeline
    assert layout is not None
    broken: dict[str, Any] = {"cuts": (0, 1), "ranks": ((0,), (1,)), "recompute": (False, False)}
    wide = replace(layout, versions=(1, 1), activations=(2, 2), **broken)
    assert "holds layers of several stages" in violations(replace(program, pipeline=wide))[0].message


def test_the_error_shows_the_actions() -> None:
    with pytest.raises(InvalidProgram) as error:
        validate(edited(generate("gpipe", 2, 2), 0, "link", swap("0SENDF0>1", "0SENDF1>1")))
    assert ">0SENDF1>1<" in str(error.value)
