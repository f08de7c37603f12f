"""Pictures: a chart that can be checked by eye, SVG and traces that parse and agree with the timeline."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from scheduler.ir.actions import parse_actions
from scheduler.ir.buckets import one_per_layer
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import data_parallel_program
from scheduler.render import chrome_trace, gantt, svg
from scheduler.simulate.simulator import Result, simulate

FOUR = Profile("four", tuple(Layer(f"l{i}", 1.0, 2.0, 4) for i in range(4)))
SVG = "{http://www.w3.org/2000/svg}"


def dear(jitter: float = 0.0) -> Result:
    program = data_parallel_program(
        "dear", one_per_layer(FOUR.sizes), parse_actions("RS0 RS1 RS2 RS3 AG3 AG2 AG1 AG0"), 4
    )
    return simulate(program, FOUR, Link(0.0, 0.25), jitter=jitter)


def test_chart_to_check_by_hand() -> None:
    """14 seconds, 5 columns each."""
    assert gantt(dear(), 70) == (
        "compute |B3--------B2--------B1--------B0--------          F0---F1---F2---F3---|\n"
        "link    |          RS0--     RS1--     RS2--     RS3--AG3--AG2--AG1--AG0--     |\n"
        "         0                                                                 14 s\n"
    )


def test_short_actions_show_what_fits() -> None:
    assert gantt(dear(), 14).splitlines()[:2] == ["compute |B3B2B1B0  FFFF|", "link    |  R R R RAAAA |"]
    with pytest.raises(ValueError, match="at least 10 columns, got 3"):
        gantt(dear(), 3)


def test_ranks_have_lanes_of_their_own() -> None:
    lines = gantt(dear(jitter=0.1), 60).splitlines()
    assert [line.split(" |")[0].strip() for line in lines[:3]] == ["compute 0", "compute 1", "link"]


def test_svg_draws_every_action_to_scale() -> None:
    result = dear()
    root = ElementTree.fromstring(svg(result, "a < b", width=1500))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and title.text is not None and box is not None
        boxes[title.text.split(":")[0]] = {name: float(box.get(name, "nan")) for name in ("x", "width")}
    assert set(boxes) == {event.name for event in result.timeline}
    assert len(boxes) == 16
    scale = 14 / (1500 - 100)
    for event in result.timeline:
        drawn = boxes[event.name]
        assert drawn["width"] * scale == pytest.approx(event.end - event.start, abs=1e-3)
        assert (drawn["x"] - 90) * scale == pytest.approx(event.start, abs=1e-3)
    assert "a < b" in [text.text for text in root.iter(f"{SVG}text")]


def test_chrome_trace_is_json_with_complete_events() -> None:
    result = dear()
    trace = json.loads(json.dumps(chrome_trace(result)))
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["compute", "link"]
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(drawn) == 16
    gather = next(e for e in drawn if e["name"] == "AG3")
    assert (threads[gather["tid"]], gather["ts"], gather["dur"], gather["cat"]) == ("link", 9e6, 1e6, "AG")
