"""Halos and gradients on one link: classes, chunks, and when interiors hide halos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.ir.actions import Kind, parse_action, traffic_class
from scheduler.ir.link import Link
from scheduler.ir.profile import Border, Layer, Profile
from scheduler.ir.program import Program
from scheduler.pipelines.passes.traffic_priority import largest_chunk
from scheduler.pipelines.tile_step import plan_tiles, predict
from scheduler.simulate.simulator import simulate
from scheduler.validate import InvalidProgram, validate, violations

LINK = Link(1e-4, 1e-8)  # 100 MB/s


def model(forward: float = 10e-3, gradient: int = 400_000, layers: int = 4) -> Profile:
    return Profile("tiles", tuple(Layer(f"l{i}", forward, 2 * forward, gradient) for i in range(layers)))


def borders(layers: int = 4, size: float = 100_000, share: float = 0.05) -> list[Border | None]:
    return [Border(size, size if layer else 0, share) for layer in range(layers)]


def test_classes() -> None:
    order = ["HALO1", "HALOB1", "0SENDF1>2", "0RECVB1<2", "RS0", "AG0", "AR0"]
    assert [traffic_class(parse_action(text)) for text in order] == [0, 0, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="F1 is no message"):
        traffic_class(parse_action("F1"))


def test_chunks_are_as_long_as_a_halo_may_wait() -> None:
    assert largest_chunk(LINK, 1.1e-3) == pytest.approx(100_000)
    with pytest.raises(ValueError, match="starting a message alone"):
        largest_chunk(LINK, 1e-4)
    program = plan_tiles(model(), borders(), LINK, longest_wait=1.1e-3)
    assert max(bucket.bytes for bucket in program.buckets) <= 100_000
    assert sum(bucket.bytes for bucket in program.buckets) == 1_600_000


def test_every_message_once_and_halos_in_the_order_of_the_layers() -> None:
    program = plan_tiles(model(), borders(), LINK)
    halos = [str(a) for a in program.link if a.kind in (Kind.HALO, Kind.HALOB)]
    assert halos == ["HALO0", "HALO1", "HALO2", "HALO3", "HALOB3", "HALOB2", "HALOB1"]
    kinds = [a.kind for a in program.link]
    assert kinds.count(Kind.RS) == kinds.count(Kind.AG) == len(program.buckets)
    assert Program.from_dict(program.to_dict()) == program
    validate(program, model())


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (lambda link: [a for a in link if str(a) != "HALO2"], "once"),
        (lambda link: [*link, link[0]], "once"),
        (lambda link: sorted(link, key=lambda action: action.kind is not Kind.AG), "order"),
        (lambda link: [parse_action("HALOB1"), *(a for a in link if str(a) != "HALOB1")], "deadlock"),
    ],
)
def test_broken_programs_of_tiles_are_refused(edit: Callable[[Any], Any], rule: str) -> None:
    program = plan_tiles(model(), borders(), LINK)
    broken = replace(program, kernel=({**program.lanes(), "link": tuple(edit(program.link))},))
    assert {violation.rule for violation in violations(broken, model())} == {rule}


def test_halos_may_have_a_wire_of_their_own() -> None:
    """A message between neighbours costs less than a collective."""
    program = plan_tiles(model(), borders(), LINK)
    links = {"link": LINK, "halo": Link(LINK.alpha, LINK.beta / 4)}
    assert simulate(program, model(), links).period < simulate(program, model(), LINK).period


def test_the_link_of_a_small_step_as_text() -> None:
    """Gradients of the last layer are sent under the backward of the first, around its halo."""
    profile = Profile("two", (Layer("a", 10e-3, 20e-3, 0), Layer("b", 10e-3, 20e-3, 1_000_000)))
    program = plan_tiles(profile, borders(2), LINK, longest_wait=5.1e-3)
    assert program.plan == "HALO0 HALO1 HALOB1 RS0 RS1 RS2 AG0 AG1 AG2"


def test_no_halo_waits_longer_than_a_chunk() -> None:
    """As the simulator shows them: between a halo's being ready and its start lies at most one gradient."""
    profile, edges, wait = model(gradient=1_500_000), borders(), 2e-3
    program = plan_tiles(profile, edges, LINK, longest_wait=wait)
    events = simulate(program, profile, LINK).timeline
    # The border of a backward ends where its first of two tasks does; forwards' halos follow a whole forward.
    ends: dict[str, list[float]] = {}
    for event in events:
        ends.setdefault(event.name, []).append(event.end)
    assert any(event.name.startswith("RS") for event in events)
    checked = 0
    for event in events:
        if event.action.kind is Kind.HALO and event.action.index:
            ready = max(ends[f"F{event.action.index - 1}"])
        elif event.action.kind is Kind.HALOB:
            ready = min(ends[f"B{event.action.index}"])
        else:
            continue
        checked += 1
        assert event.start - ready <= wait + 1e-9, event
    assert checked == 6


def test_large_interiors_hide_halos_and_small_ones_do_not() -> None:
    large = predict(model(forward=50e-3, gradient=0), borders(), LINK)
    assert large.exposed == () and large.hidden > 0.99
    assert large.without < large.overlapped < large.waiting or large.overlapped == pytest.approx(
        large.without
    )
    small = predict(model(forward=0.4e-3, gradient=0), borders(), LINK)
    assert {str(a) for a in small.exposed} == {f"HALO{i}" for i in range(4)} | {
        f"HALOB{i}" for i in (1, 2, 3)
    }
    # A halo of 1.1 ms behind an interior of 0.38 ms (0.76 ms in the backward).
    assert small.hidden == pytest.approx((4 * 0.38 + 3 * 0.76) / (7 * 1.1), abs=1e-6)
    assert predict(model(), [None] * 4, LINK).hidden == 1.0


def test_the_step_that_waits_is_longer_by_every_halo() -> None:
    found = predict(model(gradient=0), borders(), LINK)
    assert found.without == pytest.approx(4 * 30e-3)
    assert found.waiting == pytest.approx(found.without + 7 * 1.1e-3)


def test_gradients_first_would_be_slower() -> None:
    """The same messages in another order: a gradient of 1.5 MB in front of the halos of every layer."""
    profile, edges = model(forward=2e-3, gradient=300_000), borders(size=100_000)
    program = plan_tiles(profile, edges, LINK)
    best = simulate(program, profile, LINK).period
    gradients = [a for a in program.link if a.kind in (Kind.RS, Kind.AG)]
    halos = [a for a in program.link if a not in gradients]
    # All gradients at the start of the next step, before its halos.
    late = tuple(
        [parse_action(f"{a.kind}{a.index}-1") for a in sorted(gradients, key=lambda a: a.kind == "AG")]
    )
    other = replace(program, kernel=({**program.lanes(), "link": (*late, *halos)},))
    validate(other, profile)
    assert simulate(other, profile, LINK).period > 1.1 * best


def test_a_program_for_other_borders_is_refused() -> None:
    program = plan_tiles(model(), borders(), LINK)
    with pytest.raises(InvalidProgram, match="HALO3 does not belong to rank 0"):
        validate(replace(program, borders=(*borders()[:3], None)), model())
    with pytest.raises(ValueError, match="layer 3 has no border"):
        simulate(replace(program, borders=(*borders()[:3], None)), model(), LINK)
    with pytest.raises(ValueError, match="4 layers, got 3"):
        plan_tiles(model(), borders(3), LINK)
    with pytest.raises(ValueError, match="share from 0 to 1"):
        Border(1, 1, 1.5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-4, 5e-2), st.integers(0, 500_000), st.integers(0, 200_000), st.floats(0, 1)),
        min_size=1,
        max_size=6,
    )
)
def test_any_model_is_planned_and_never_faster_than_its_parts(
    rows: list[tuple[float, int, int, float]],
) -> None:
    profile = Profile("any", tuple(Layer(str(i), f, 2 * f, size) for i, (f, size, _, _) in enumerate(rows)))
    edges: list[Border | None] = [
        Border(halo, halo if i else 0, share) if halo else None for i, (_, _, halo, share) in enumerate(rows)
    ]
    found = predict(profile, edges, LINK)
    assert found.without >= profile.compute - 1e-9
    assert found.without - 1e-9 <= found.waiting
    assert profile.compute - 1e-9 <= found.overlapped
