"""The registry, layouts, runs of any length, and what users get told."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from scheduler import pipelines
from scheduler.ir.actions import Kind
from scheduler.ir.link import Cluster, Level, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program, depth, unroll
from scheduler.pipelines import Layout, build, delays, generate
from scheduler.pipelines.schedules import bundle_ranks, by_stage, flushed
from scheduler.simulate.costs import Durations
from scheduler.simulate.lowering import lower_pipeline
from scheduler.simulate.simulator import run
from scheduler.validate import validate

FOUR = Profile("four", tuple(Layer(f"l{n}", 1.0, 2.0, 8 << 20, 64) for n in range(4)))


def layout(**fields: Any) -> Layout:
    base = {
        "cuts": (0, 1),
        "ranks": ((0,), (1,)),
        "microbatches": 1,
        "versions": (1, 1),
        "activations": (1, 1),
    }
    return Layout(**{**base, **fields})


# Registry


def test_names_and_spellings() -> None:
    assert set(pipelines.names()) >= {
        "gpipe", "1f1b", "interleaved", "zero_bubble", "pipedream", "2bw", "wpipe", "ashpipe", "bundle",
    }  # fmt: skip
    assert pipelines.get("Zero-Bubble") is pipelines.get("zero_bubble")
    with pytest.raises(ValueError, match="no pipeline schedule 'pipe'; the schedules are gpipe, 1f1b"):
        generate("pipe", 2)


def test_a_generator_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, but the first one looks one micro-batch further ahead than it must."""
    monkeypatch.setattr(build, "_ADDED", {})

    def eager(positions: int, microbatches: int) -> list[Any]:
        items = by_stage(positions, microbatches)
        return [flushed(mine, mine, min(positions - stage, microbatches)) for stage, mine in enumerate(items)]

    pipelines.register("Very-eager", eager)
    program = generate("very_eager", 2, 4)
    validate(program)
    assert program.pipeline is not None and program.pipeline.activations == (3, 2)
    for taken in ("very-eager", "GPipe"):
        with pytest.raises(ValueError, match="exists already"):
            pipelines.register(taken, eager)


def test_an_order_that_cannot_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two periods ahead with the version of one period ago."""
    from scheduler.pipelines.schedules import endless

    monkeypatch.setattr(build, "_ADDED", {})
    (items,) = by_stage(1, 2)
    pipelines.register("hasty", lambda positions, count: [endless(items, items, 4, {0: -1})])
    with pytest.raises(ValueError, match="0F0@-1.2 needs a version of stage 0 whose gradient 0B1@-1"):
        generate("hasty", 1, 2)


# Layouts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 0}, "at least 1 micro-batch"),
        ({"placement": "aligned"}, "no placement 'aligned'; the placements are eager, bubble"),
        ({"reduction": "tree"}, "no reduction 'tree'"),
        ({"versions": (1,)}, "versions must have one entry for each of the 2 stages, got 1"),
        ({"cuts": (1, 0)}, "cuts must start with layer 0 and rise"),
        ({"ranks": ((0,), (2,))}, "numbered from 0 without gaps"),
        ({"ranks": ((0, 1), (1, 2))}, "share all of their ranks or none"),
        ({"memory": (1,)}, "memory must have an entry for each of 2 ranks"),
    ],
)
def test_wrong_layouts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "at least 1 stage"),
        ({"stages": 2, "replicas": [1]}, "replicas must be a count of at least 1 for each of 2"),
        ({"stages": 2, "ranks": [[0]]}, "ranks must list the ranks of each of 2 positions"),
        ({"stages": 2, "cuts": (0,), "profile": FOUR}, "has 2 stages and needs as many cuts"),
        ({"stages": 2, "cuts": (0, 4), "profile": FOUR}, "starts at layer 4, profile 'four' has 4 layers"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate("1f1b", **arguments)


def test_wrong_arguments_of_generators() -> None:
    with pytest.raises(ValueError, match="steps after every minibatch and does not divide it, got 4"):
        generate("ashpipe", 2, 4)
    with pytest.raises(ValueError, match="one batch in flight"):
        generate("bundle", 3)
    with pytest.raises(ValueError, match="virtual=0"):
        generate("interleaved", 2, 2, virtual=0)
    with pytest.raises(ValueError, match="got 0 hosts"):
        bundle_ranks(0)


@pytest.mark.parametrize(("one", "other"), [(4, 3), (3, 1), (2, 6), (5, 5)])
def test_every_row_is_sent_once(one: int, other: int) -> None:
    """Whatever the counts: what the ranks of one stage share with those of the next is the whole."""
    program = generate("ashpipe", 2, replicas=[one, other])
    found = program.pipeline
    assert found is not None
    received = Counter[int]()
    for rank in found.ranks[0]:
        shares = found.overlaps(0, rank, 1)
        assert sum(shares.values()) == pytest.approx(1 / one)
        received.update(shares)  # type: ignore[arg-type]
    assert all(received[rank] == pytest.approx(1 / other) for rank in found.ranks[1])


def test_hash_covers_the_layout() -> None:
    program = generate("1f1b", 2, 2, replicas=2)
    assert program.pipeline is not None
    other = replace(program, pipeline=replace(program.pipeline, recompute=(True, False)))
    assert other.hash != program.hash
    damaged = {**program.to_dict(), "pipeline": {"cuts": [0], "colour": 1}}
    with pytest.raises(ValueError, match="program: pipeline: missing .*unknown fields .'colour'."):
        Program.from_dict(damaged)


# Bundles


@pytest.mark.parametrize(("hosts", "shape"), [(1, (1, 1)), (2, (1, 1)), (3, (4, 2)), (2, (3,))])
def test_bundles(hosts: int, shape: tuple[int, ...]) -> None:
    """A front and a rear on every host, or data parallelism alone; only gradients leave a host."""
    program = generate("bundle", len(shape), ranks=bundle_ranks(hosts, shape))
    validate(program)
    each = sum(shape)
    for rank, lanes in enumerate(program.kernel):
        peers = {
            action.peer // each for action in (*lanes["link"], *lanes["recv"]) if action.peer is not None
        }
        assert peers <= {rank // each}
        reduced = [action.kind for action in lanes["link"] if action.kind in (Kind.AR, Kind.RS, Kind.AG)]
        assert reduced == ([Kind.AR] if hosts > 1 else [])
    assert program.gather == "gradients"


# Runs


@pytest.mark.parametrize(("schedule", "count"), [("pipedream", 1), ("2bw", 3), ("wpipe", 2), ("1f1b", 2)])
def test_a_run_does_every_action_in_every_period(schedule: str, count: int) -> None:
    program = generate(schedule, 3, count, replicas=2)
    for periods in range(1, depth(program) + 4):
        whole = unroll(program, periods)
        actions = Counter(
            (rank, str(replace(action, shift=0)))
            for rank, lanes in enumerate(whole)
            for order in lanes.values()
            for action in order
        )
        assert set(actions.values()) == {periods}


def test_synchronous_programs_have_no_delay_and_no_fill_across_periods() -> None:
    program = generate("1f1b", 4, 8)
    assert depth(program) == 0
    assert delays(program) == (0, 0, 0, 0)


# Clusters


def test_messages_cost_what_their_level_costs() -> None:
    """Two hosts of two devices: 1 s per byte inside, 10 s between."""
    cluster = Cluster((Level(2, 0.0, 1.0), Level(2, 0.0, 10.0)))
    assert cluster.message(0, 1, 3.0) == 3.0
    assert cluster.message(2, 1, 3.0) == 30.0
    assert cluster.collective(Kind.RS, (0, 1), 8.0) == 4.0
    assert cluster.collective(Kind.AR, (0, 1, 2, 3), 8.0) == 2 * 60.0
    # In two tiers half of the bytes leave each host; this message is one segment, and halves wait inside.
    assert cluster.collective(Kind.RS, (0, 1, 2, 3), 8.0) == 40.0 + 4.0
    assert cluster.collective(Kind.RS, (0, 1, 2, 3), 8.0, inside=40.0) == 160.0 + 40.0
    assert cluster.collective(Kind.RS, (0, 2), 8.0) == 40.0
    assert cluster.collective(Kind.RS, (0, 1, 2), 8.0) == pytest.approx(160 / 3)
    assert cluster.at((0, 2, 1, 3)).collective(Kind.AG, (0, 2, 3), 8.0) == pytest.approx(160 / 3)
    assert cluster.at((0, 2, 1, 3)).collective(Kind.AG, (0, 1), 8.0) == 40.0
    assert cluster.at((2, 3, 0, 1)).message(0, 2, 1.0) == 10.0
    with pytest.raises(ValueError, match="one entry for each of 4 devices, got 1"):
        Cluster((Level(2, 0.0, 1.0), Level(2, 0.0, 1.0)), (5,))
    with pytest.raises(ValueError, match="at least one level"):
        Cluster(())


def test_a_flat_cluster_is_a_link_for_messages() -> None:
    program = generate("1f1b", 4, 3, profile=FOUR)
    link = Link(0.25, 1 / 256)
    one = run(lower_pipeline(program, FOUR, link)).period
    assert run(lower_pipeline(program, FOUR, Cluster.flat(4, link))).period == pytest.approx(one)


def test_importing_programs_loads_no_generator() -> None:
    code = (
        "import sys, scheduler.ir.program;print(sorted(m for m in sys.modules if m.startswith('scheduler.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "scheduler.ir.layout" in loaded
    assert "scheduler.pipelines.build" not in loaded


def test_replicas_add_whole_gradients_inside_their_hosts() -> None:
    """An RS of int8 was simulated as if quarters of the gradients moved inside the hosts, too."""
    profile = Profile("int8", (Layer("0", 1.0, 2.0, 100, rs_share=0.25),))
    program = generate("1f1b", 1, 1, replicas=4, profile=profile)
    cluster = Cluster((Level(2, 0.0, 1.0), Level(2, 0.0, 2.0)))
    durations = Durations(program, profile, cluster)
    seconds = {a.kind: durations.seconds(0, a) for a in program.kernel[0]["link"]}
    # Half of the bytes on each wire: 100 inside and 25 between; all is one segment, which waits for both.
    assert seconds == {Kind.RS: 50.0 + 25.0, Kind.AG: 100.0 + 50.0}
