"""The simulator, against results worked out by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.ir.actions import Action, Kind, parse_actions
from scheduler.ir.buckets import one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program, data_parallel_program
from scheduler.render import gantt
from scheduler.simulate.simulator import lower, run, simulate
from scheduler.simulate.task_graph import COMPUTE, LINK, GraphBuilder, Task, TaskGraph
from scheduler.validate import validate
from tests.support.scheduling_problems import two_tiers

# Two layers: forward 1, backward 2 seconds; 4 bytes each. A reduce-scatter or an all-gather takes 1 + 0.5 * 4
# = 3 seconds.
TWO = Profile("two", (Layer("a", 1.0, 2.0, 4), Layer("b", 1.0, 2.0, 4)))
WIRE = Link(1.0, 0.5)


def program(order: str, profile: Profile = TWO, **options: Any) -> Program:
    return data_parallel_program(
        "test", one_per_layer(profile.sizes), parse_actions(order), len(profile.layers), **options
    )


def times(result: Any) -> dict[str, tuple[float, float]]:
    return {str(event.action): (event.start, event.end) for event in result.timeline}


def test_order_by_hand() -> None:
    """Bucket 0 is layer 1, bucket 1 is layer 0::

    compute | B1   B0            .           .F0 .    F1
    link    |      RS0   RS1     AG1           AG0
    """
    result = simulate(program("RS0 RS1 AG1 AG0"), TWO, WIRE)
    assert times(result) == {
        "B1": (0, 2),
        "B0": (2, 4),
        "RS0": (2, 5),
        "RS1": (5, 8),
        "AG1": (8, 11),
        "AG0": (11, 14),
        "F0+1": (11, 12),
        "F1+1": (14, 15),
    }
    assert (result.period, result.compute, result.exposed) == (15, 6, 9)
    assert result.link_utilisation == pytest.approx(12 / 15)
    assert result.settled


def test_all_reduce_costs_one_of_each() -> None:
    result = simulate(program("AR0 AR1"), TWO, WIRE)
    assert times(result)["AR1"] == (8, 14)
    assert result.period == 16


def test_gathered_gradients_are_updated_before_the_forward_that_needs_them() -> None:
    profile = Profile("two", TWO.layers, update_per_byte=0.25)
    result = simulate(program("RS0 RS1 AG1 AG0"), profile, WIRE)
    assert times(result)["UPDATE1"] == (11, 12)
    assert times(result)["F0+1"] == (12, 13)
    assert times(result)["UPDATE0"] == (14, 15)
    assert result.period == 16
    assert result.compute == 8


def test_sharded_update_stands_between_rs_and_ag() -> None:
    """Updates take 0.25 * 4 / 2 ranks = 0.5 seconds, in their own lane, after the backward unless early."""
    profile = Profile("two", TWO.layers, update_per_byte=0.25)
    late = times(simulate(program("RS0 RS1 AG1 AG0", gather="parameters"), profile, WIRE))
    assert (late["UPDATE0"], late["UPDATE1"], late["AG1"]) == ((5, 5.5), (8, 8.5), (8.5, 11.5))
    early = times(simulate(program("RS0 AG0 RS1 AG1", gather="parameters", early_step=True), profile, WIRE))
    assert (early["UPDATE0"], early["AG0"]) == ((5, 5.5), (5.5, 8.5))


def test_step_waits_for_the_whole_backward_unless_early() -> None:
    profile = Profile("two", (Layer("a", 1.0, 20.0, 4), Layer("b", 1.0, 2.0, 4)))
    late = simulate(program("RS0 AG0 RS1 AG1", profile, gather="parameters"), profile, WIRE)
    early = simulate(program("RS0 AG0 RS1 AG1", profile, gather="parameters", early_step=True), profile, WIRE)
    assert times(late)["AG0"] == (22, 25)
    assert times(early)["AG0"] == (5, 8)


def test_a_data_parallel_step_has_no_weight_gradients_of_their_own() -> None:
    """Programs saved by earlier versions may have them. Profiles with ``weight_backward`` remain valid."""
    timed = Profile("two", tuple(replace(layer, weight_backward=0.5) for layer in TWO.layers))
    lanes = {"compute": parse_actions("B1 B0 W1 W0 F0+1 F1+1"), "link": parse_actions("RS0 RS1 AG1 AG0")}
    saved = Program("older", one_per_layer(timed.sizes), (lanes,), 2)
    with pytest.raises(ValueError, match="W1 in lane 'compute' is no action of a data-parallel program"):
        simulate(saved, timed, WIRE)
    with pytest.raises(ValueError, match="W1 does not belong to rank 0 of this program"):
        validate(saved, timed)
    usual = program("RS0 RS1 AG1 AG0", TWO)
    assert simulate(usual, timed, WIRE).period == simulate(usual, TWO, WIRE).period


def test_two_links_work_side_by_side() -> None:
    lanes = {
        "compute": parse_actions("B1 B0 F0+1 F1+1"),
        "fast": parse_actions("RS0 AG0"),
        "slow": parse_actions("RS1 AG1"),
    }
    both = Program("two links", one_per_layer(TWO.sizes), (lanes,), 2)
    result = simulate(both, TWO, {"fast": Link(0.0, 0.5), "slow": WIRE})
    assert times(result)["AG0"] == (4, 6)
    assert times(result)["AG1"] == (7, 10)
    assert result.period == 12
    assert result.link_utilisation == pytest.approx((4 + 6) / (2 * 12))
    with pytest.raises(ValueError, match=r"uses link 'slow'; links were given for \['fast'\]"):
        simulate(both, TWO, {"fast": WIRE})


def test_gathers_of_the_previous_iteration() -> None:
    """A kernel that is rotated so that AGs stand first does the same work in the same time."""
    lanes = {
        "compute": parse_actions("F0 F1 B1 B0"),
        "link": parse_actions("AG1-1 AG0-1 RS0 RS1"),
    }
    result = simulate(Program("rotated", one_per_layer(TWO.sizes), (lanes,), 2), TWO, WIRE)
    assert result.period == 15
    assert result.settled


def graph(first: float, second: float, ahead: int, one_at_a_time: bool) -> TaskGraph:
    """A forward and a transfer behind it; the forward may run ``ahead`` iterations ahead of the transfer."""
    builder = GraphBuilder()
    compute = builder.task(Task(Action(Kind.F, 0), "compute", 0), first, COMPUTE)
    link = builder.task(Task(Action(Kind.AG, 0), "link"), second, LINK)
    builder.edge(compute, link)
    builder.edge(link, compute, lag=ahead)
    if one_at_a_time:
        builder.lane([compute])
        builder.lane([link])
    return builder.build()


def test_two_tiers_by_hand() -> None:
    """A second inside the host for each RS and AG, and 3 between hosts::

    compute | B1    B0          .           .           .F0 F1
    inside  |      RS0   RS1                AG0           AG1
    link    |        RS0   AG0       RS1          AG1
    """
    overlapped = two_tiers(Link(0.0, 0.25), WIRE)
    result = simulate(program("RS0 AG0 RS1 AG1"), TWO, overlapped)
    assert gantt(result, 54).splitlines()[:3] == [
        "compute |B1----B0----                                    F0-F1-|",
        "inside  |      RS0   RS1            AG0               AG1      |",
        "link    |         RS0------AG0------RS1------AG1------         |",
    ]
    assert (result.period, result.exposed) == (18, 12)
    # One after the other, each takes 4 s on one link.
    serial = simulate(program("RS0 AG0 RS1 AG1"), TWO, replace(overlapped, overlaps=False))
    assert serial.period == 2 + 4 * 4 + 2
    assert {event.lane for event in serial.timeline} == {"compute", "link"}


def test_an_rs_does_not_pass_the_ag_that_its_backward_waits_for() -> None:
    """A kernel that begins with the forward: AG1 of the iteration before stands before RS0 of this one."""
    compute, link = parse_actions("F0 F1 B1 B0"), parse_actions("RS1-1 AG1-1 AG0-1 RS0")
    early = Program("early", one_per_layer(TWO.sizes), ({"compute": compute, "link": link},), 2)
    validate(early, TWO)
    overlapped = two_tiers(Link(0.0, 0.25), WIRE)
    # RS1 1 + 3, AG1 3 + 1, AG0 another 3 s behind AG1, F1 1, B1 2, RS0 1 + 3 s; AG1 inside is beside AG0.
    assert simulate(early, TWO, overlapped).period == 4 + 3 + 3 + 1 + 1 + 2 + 4 - 1


@pytest.mark.parametrize(
    ("first", "second", "ahead", "one_at_a_time", "period"),
    [
        (1.0, 3.0, 1, True, 4.0),  # one after the other
        (1.0, 3.0, 2, True, 3.0),  # the link is the bottleneck
        (3.0, 1.0, 5, True, 3.0),  # the compute is
        (1.0, 2.0, 2, False, 1.5),  # repeats only every second iteration
        (1.0, 2.0, 3, False, 1.0),  # ... every third
    ],
)
def test_work_across_iterations_settles(
    first: float, second: float, ahead: int, one_at_a_time: bool, period: float
) -> None:
    result = run(graph(first, second, ahead, one_at_a_time))
    assert result.settled
    assert result.period == pytest.approx(period)


def test_compute_is_slower_while_the_link_is_busy() -> None:
    """B0 (2 s) runs under RS0 (3 s) at 1/1.5 of its speed: 3 s. F0 runs under AG0: 1.5 s."""
    result = simulate(program("RS0 RS1 AG1 AG0"), TWO, WIRE, slowdown=0.5)
    assert times(result)["B0"] == (2, 5)
    assert times(result)["F0+1"] == (11, 12.5)
    # B0 with a short RS0: 1 s of the reduction slows 2/3 s of work, the rest runs at full speed.
    short = simulate(program("RS0 RS1 AG1 AG0"), TWO, Link(0.0, 0.25), slowdown=0.5)
    assert times(short)["B0"] == pytest.approx((2, 2 + 1 + (2 - 2 / 3)))


def test_jitter_waits_for_the_slowest_rank() -> None:
    dear = program("RS0 RS1 AG1 AG0", ranks=8)
    result = simulate(dear, TWO, WIRE, jitter=0.2, iterations=50)
    assert result.period > simulate(dear, TWO, WIRE, jitter=0.2, iterations=50, ranks=1).period > 14
    assert result.period == simulate(dear, TWO, WIRE, jitter=0.2, iterations=50).period
    assert not result.settled
    ends = {event.rank: event.end for event in result.timeline if event.action == Action(Kind.B, 0)}
    assert len(ends) == 8
    start = next(event.start for event in result.timeline if event.action == Action(Kind.RS, 1))
    assert start >= max(ends.values())
    # On average a rank is neither faster nor slower than without.
    alone = simulate(program("RS0 RS1 AG1 AG0"), TWO, Link(0.0, 0.0), jitter=0.5, iterations=20_000, ranks=1)
    assert alone.period == pytest.approx(alone.compute, rel=0.02)


def test_fixed_number_of_iterations() -> None:
    result = simulate(program("RS0 RS1 AG1 AG0"), TWO, WIRE, iterations=1)
    assert (result.iterations, result.period) == (1, 15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slowdown": -1}, "slowdown must be a finite number of at least 0, got -1"),
        ({"jitter": float("nan")}, "jitter must be a finite number"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"jitter": 0.1, "ranks": 10**6}, "simulate fewer with ranks=N"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(program("RS0 RS1 AG1 AG0"), TWO, WIRE, **options)


def test_plan_for_another_model() -> None:
    with pytest.raises(ValueError, match="for a model of 2 layers, profile 'one' has 1"):
        simulate(program("RS0 RS1 AG1 AG0"), Profile("one", TWO.layers[:1]), WIRE)


def test_deadlock_is_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="deadlocks: .*AG0"):
        simulate(program("AG0 RS0 RS1 AG1"), TWO, WIRE)


@pytest.mark.bench
def test_thousand_buckets_in_a_millisecond() -> None:
    layers = tuple(Layer(str(i), 1e-4, 2e-4, 1000 + i) for i in range(1000))
    profile = Profile("large", layers)
    order = [Action(Kind.RS, i) for i in range(1000)] + [Action(Kind.AG, i) for i in reversed(range(1000))]
    large = data_parallel_program("dear", one_per_layer(profile.sizes), order, 1000)
    lowered = lower(large, profile, WIRE)
    run(lowered, 1)
    taken = []
    for _ in range(30):
        begin = time.thread_time()  # of this thread alone: others may have the processor meanwhile
        run(lowered, 1)
        taken.append(time.thread_time() - begin)
    assert np.min(taken) < 1e-3


def test_import_neither_compiles_nor_imports_numba() -> None:
    """A tool that only parses a plan must not wait for a compiler."""
    modules = (
        "scheduler.simulate.simulator, scheduler.validate, scheduler.policies, scheduler.render,"
        " scheduler.simulate.step_model"
    )
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)
