"""Pipelines in the simulator: bubbles against closed formulas, memory, messages, placements, traces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from scheduler.ir.actions import Kind
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import data_parallel_program
from scheduler.pipelines import generate
from scheduler.pipelines.report import PipelineReport, examine
from scheduler.render import chrome_trace, gantt
from scheduler.simulate.costs import peak_memory
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

FREE = Link(0.0, 0.0)
FORWARD, BACKWARD = 1.0, 2.0


def model(layers: int, size: int = 0, activation: int = 0, update: float = 0.0) -> Profile:
    layer = Layer("layer", FORWARD, BACKWARD, size, activation, weight_backward=1.0)
    return Profile("equal", (layer,) * layers, update)


def examined(schedule: str, stages: int, count: int, link: Link = FREE) -> PipelineReport:
    virtual = 2 if schedule in ("interleaved", "wpipe") else 1
    profile = model(stages * virtual)
    return examine(generate(schedule, stages, count, profile=profile), profile, link)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_bubbles_are_those_of_the_formulas(stages: int, count: int) -> None:
    """The idle part of the time is (S-1)/(M+S-1), divided by V within where a rank has V stages."""
    for schedule in ("gpipe", "1f1b"):
        found = examined(schedule, stages, count).bubble_fraction
        assert found == pytest.approx((stages - 1) / (count + stages - 1))
    if count >= stages:
        found = examined("interleaved", stages, count).bubble_fraction
        assert found == pytest.approx((stages - 1) / (2 * count + stages - 1))
        # ZB-H1: (S-1) * (F + B - W) of idle time, with F = B = W.
        found = examined("zero_bubble", stages, count).bubble_fraction
        assert found == pytest.approx((stages - 1) / (3 * count + stages - 1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "2bw", "wpipe"])
def test_handling_takes_time_and_is_no_computation(schedule: str) -> None:
    """The same seconds around every action of every rank: they count as the bubble they are."""
    stages = 8 if schedule in ("interleaved", "wpipe") else 4
    profile, each = model(stages), 0.125
    program = generate(schedule, 4, 8, profile=profile)
    without, report = examine(program, profile, FREE), examine(program, profile, FREE, (each,) * 4)
    for rank in range(4):
        actions = len(program.kernel[rank]["compute"])
        busy = (1 - without.bubble[rank]) * without.period
        assert report.period >= busy + each * actions
        assert report.bubble[rank] == pytest.approx(1 - busy / report.period)


def test_handling_is_each_rank_s_own() -> None:
    profile = model(2)
    program = generate("2bw", 2, 2, profile=profile)
    slow = examine(program, profile, FREE, (0.0, 0.5))
    assert slow.period == pytest.approx(2 * (FORWARD + BACKWARD) + 5 * 0.5)  # F F B B STEP
    assert slow.bubble[1] == pytest.approx(2.5 / 8.5)


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
def test_more_virtual_stages_divide_the_bubble(virtual: int) -> None:
    profile = model(4 * virtual)
    program = generate("interleaved", 4, 8, profile=profile, virtual=virtual)
    assert examine(program, profile, FREE).bubble_fraction == pytest.approx(3 / (8 * virtual + 3))


@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "wpipe"])
def test_asynchronous_schedules_have_no_bubble(schedule: str, count: int) -> None:
    """Where there are enough micro-batches in flight: PipeDream always, the others from M = S - 1."""
    if schedule == "pipedream" or count >= 3:
        assert examined(schedule, 4, count).bubble_fraction == pytest.approx(0)
    else:
        assert examined(schedule, 4, count).bubble_fraction > 0


def test_messages_take_their_time() -> None:
    """Two stages, one micro-batch: there and back, 1 s of start-up and 0.5 s per byte each."""
    profile = model(2, activation=4)
    program = generate("gpipe", 2, 1, profile=profile)
    assert simulate(program, profile, Link(1.0, 0.5)).period == pytest.approx(2 * 3 + 2 * (1 + 0.5 * 4))


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_two_hops_hide_messages(schedule: str) -> None:
    """Messages of 1.25 s both ways, forward and backward 3 s: hidden at rest with twice the lead."""
    profile = model(3, activation=5)
    link = Link(0.0, 0.25)
    one, two = (generate(schedule, 3, 12, profile=profile, hop=hop) for hop in (1, 2))
    validate(two, profile)
    assert simulate(two, profile, link).period < simulate(one, profile, link).period
    if schedule == "2bw":
        assert simulate(two, profile, link).period == pytest.approx(12 * 3)
        assert two.pipeline is not None and two.pipeline.activations == (5, 3, 1)
    with pytest.raises(ValueError, match="got hop=0"):
        generate(schedule, 3, 12, hop=0)


def test_replicas_share_rows_and_send_each_other_what_overlaps() -> None:
    """Three ranks compute a third each; the last one needs 2/3 of one and 1/3 of the other neighbour."""
    profile = model(2, activation=6)
    program = generate("ashpipe", 2, replicas=[3, 2], profile=profile)
    sends = {(r, a.peer) for r in range(3) for a in program.kernel[r]["link"] if a.kind is Kind.SENDF}
    assert sends == {(0, 3), (1, 3), (1, 4), (2, 4)}
    layout = program.pipeline
    assert layout is not None
    assert layout.overlaps(0, 1, 1) == pytest.approx({3: 1 / 6, 4: 1 / 6})
    assert sum(layout.overlaps(1, 4, 0).values()) == pytest.approx(1 / 2)
    events = simulate(program, profile, Link(0.0, 1.0)).timeline
    lasts = {str(e.action): e.end - e.start for e in events if e.rank == 1 and e.action.kind is Kind.SENDF}
    assert lasts == pytest.approx({"0SENDF0>3+1": 1.0, "0SENDF0>4+1": 1.0})
    forwards = [e.end - e.start for e in sorted(events, key=lambda e: e.rank) if e.action.kind is Kind.F]
    assert forwards == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


def test_what_stays_with_fewer_rows() -> None:
    layers = Layer("a", 1.0, 2.0, 4, fixed=0.25), Layer("b", 1.0, 2.0, 4)
    profile = Profile("uneven", layers)
    program = generate("ashpipe", 2, replicas=[2, 2], profile=profile)
    events = simulate(program, profile, Link(0.0, 0.0)).timeline
    forwards = {e.rank: e.end - e.start for e in events if e.action.kind is Kind.F}
    assert forwards == pytest.approx({0: 0.25 + 0.75 / 2, 1: 0.25 + 0.75 / 2, 2: 0.5, 3: 0.5})


def test_declared_versions_and_activations_are_those_of_the_papers() -> None:
    stages = range(4)
    for schedule, count, versions, activations in (
        ("gpipe", 6, [1] * 4, [6] * 4),
        ("1f1b", 6, [1] * 4, [4 - s for s in stages]),
        ("zero_bubble", 6, [1] * 4, [4] * 4),
        ("pipedream", 1, [4 - s for s in stages], [4 - s for s in stages]),
        ("2bw", 6, [2] * 4, [4 - s for s in stages]),
    ):
        report = examined(schedule, 4, count)
        assert list(report.versions) == versions, schedule
        assert list(report.activations) == activations, schedule
    assert examined("wpipe", 4, 4).versions == (2, 2, 2, 2, 1, 1, 1, 1)
    assert examined("wpipe", 4, 4).delays == (1, 1, 1, 1, 0, 0, 0, 0)


def test_peak_memory() -> None:
    """Versions and a gradient of 100 bytes each, 10 bytes of activations for each micro-batch in flight."""
    profile = model(3, size=100, activation=10)
    program = generate("pipedream", 3, profile=profile)
    assert examine(program, profile, FREE).memory == (430, 320, 210)
    assert peak_memory(program, profile) == 430
    memory = examine(generate("gpipe", 3, 5, profile=profile), profile, FREE).memory
    assert memory == (250, 250, 250)
    # Two stages on each rank: G0 has two versions and keeps its activations while G1 works.
    profile = model(4, size=100, activation=10)
    memory = examine(generate("wpipe", 2, 2, profile=profile), profile, FREE).memory
    assert memory == (300 + 200 + 10 * 4, 300 + 200 + 10 * 3)


def test_recomputation_trades_time_for_memory() -> None:
    profile = model(4, size=100, activation=10)
    plain = generate("gpipe", 2, 5, profile=profile, cuts=(0, 2))
    again = generate("gpipe", 2, 5, profile=profile, cuts=(0, 2), recompute=True)
    assert simulate(plain, profile, FREE).period == (5 + 1) * (2 + 4)
    assert simulate(again, profile, FREE).period == (5 + 1) * (2 + 6)
    # Kept: nothing but the input (the first stage's is the data), and all activations once.
    assert examine(plain, profile, FREE).memory == (400 + 5 * 20, 400 + 5 * 20)
    assert examine(again, profile, FREE).memory == (400 + 20, 400 + 5 * 10 + 20)


def test_slack_of_a_stage_hides_its_reduction() -> None:
    """Stage s of 1F1B has s * (F + B) of slack: RS, step and AG that fit into it cost nothing."""
    profile = Profile("slack", (Layer("a", 2, 4, 0), Layer("b", 2, 4, 12), Layer("c", 2, 4, 24)))
    program = generate("1f1b", 3, 4, replicas=2, profile=profile)
    bare = simulate(program, profile, FREE).period
    assert simulate(program, profile, Link(0.0, 0.125)).period == pytest.approx(bare)
    assert simulate(program, profile, Link(0.0, 0.130)).period > bare


def test_first_stage_reduces_inside_its_backward() -> None:
    """It has no slack; but of several buckets only the last RS and the first AG are exposed."""
    profile = Profile("front", (Layer("a", 4, 8, 4096), Layer("b", 4, 8, 0)))
    link = Link(0.0, 2 / 4096)
    periods = []
    for size in (4096, 1024, 256):
        program = generate("1f1b", 2, 4, replicas=2, profile=profile, bucket_bytes=size)
        periods.append(simulate(program, profile, link).period)
    bare = simulate(program, profile, FREE).period
    assert [period - bare for period in periods] == pytest.approx([4.0, 1.0, 0.25])


def test_bubble_placement_beats_eager() -> None:
    """Eager reduces before the gradient goes upstream, so on one wire the stages before it wait for it."""
    profile = model(4, size=4096, activation=16)
    link = Link(0.0, 2 / 4096)
    periods = {
        placement: simulate(
            generate("1f1b", 4, 8, replicas=2, profile=profile, placement=placement, bucket_bytes=512),
            profile,
            link,
        ).period
        for placement in ("bubble", "eager")
    }
    assert periods["bubble"] < periods["eager"]


def test_wires_of_their_own() -> None:
    """A slow wire between replicas does not hold up messages that have another one."""
    profile = model(2, size=64, activation=8)
    program = generate("2bw", 2, 4, replicas=2, profile=profile)
    slow, fast = Link(0.0, 0.06), Link(0.0, 0.001)
    shared = simulate(program, profile, slow).period
    apart = simulate(program, profile, {"link": slow, "send": fast}).period
    assert apart < shared


def test_trace_and_chart() -> None:
    """One iteration of every rank, nothing at the same time on one of them."""
    profile = model(3, size=64, activation=8)
    program = generate("pipedream", 3, replicas=[2, 1, 1], profile=profile)
    result = simulate(program, profile, Link(0.01, 0.001))
    for rank in range(4):
        compute = [event for event in result.timeline if event.rank == rank and event.lane == "compute"]
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(compute))
    names = [event["name"] for event in json.loads(json.dumps(chrome_trace(result)))["traceEvents"]]
    assert {"0F0@-2", "2B0", "0RS2", "1SENDB0>0", "2STEP"} <= set(names)
    assert "compute 3" in gantt(result)


def test_report_in_words() -> None:
    report = examined("2bw", 2, 2)
    assert str(report).startswith("2bw: 6 s per step, bubble 0.0%, peak memory")
    assert "delays      1 1" in str(report)
    with pytest.raises(ValueError, match="for a model of 2 layers, profile 'equal' has 3"):
        examine(generate("2bw", 2, 2), model(3), FREE)
    with pytest.raises(ValueError, match="only programs with stages"):
        examine(data_parallel_program("x", (), (), 2), model(2), FREE)
