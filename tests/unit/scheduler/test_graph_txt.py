"""graph.txt: PipeDream's format in and out."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler import profiles
from scheduler.formats.pipedream import Graph, format_graph, parse_graph
from scheduler.ir.profile import Layer, Profile
from scheduler.profiles import find

META = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
SINK = "node4 -- Add(inplace) -- " + META.format("0.125", "0.250", "16.0", "0.000")
# A diamond, written out of order, as PipeDream's profiler writes it: stages, several outputs, an input node.
DIAMOND = "\n".join(
    [
        SINK + " -- stage_id=1",
        "node1 -- Input0 -- " + META.format("0.000", "0.000", "8.0", "0.000") + " -- stage_id=0",
        "node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- "
        + META.format("1.500", "3.000", "[4.0; 8.0]", "93184.000")
        + " -- stage_id=0",
        "node3 -- ReLU() -- " + META.format("0.001", "0.002", "4.0", "0.000") + " -- stage_id=0",
        "\tnode1 -- node2",
        "\tnode1 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node4",
        "",
    ]
)


def test_reads_what_pipedream_writes() -> None:
    assert parse_graph(DIAMOND).profile("diamond").layers == (
        Layer("Input0", 0.0, 0.0, 0, 8),
        Layer("Conv2d(3, 64, kernel_size=(3, 3))", 0.0015, 0.003, 93184, 12),
        Layer("ReLU()", 1e-6, 2e-6, 0, 4),
        Layer("Add(inplace)", 0.000125, 0.00025, 0, 16),
    )
    assert [node.stage for node in parse_graph(DIAMOND).nodes] == [1, 0, 0, 0]


def test_writes_a_chain() -> None:
    profile = Profile("p", (Layer("a", 0.0015, 0.003, 8, 4), Layer("b -- c\n", 1e-7, 0.0, 0)))
    assert format_graph(Graph.chain(profile)) == (
        "node1 -- a -- forward_compute_time=1.5, backward_compute_time=3, activation_size=4.0,"
        " parameter_size=8.000\n"
        "node2 -- b - c -- forward_compute_time=0.0001, backward_compute_time=0, activation_size=0.0,"
        " parameter_size=0.000\n"
        "\tnode1 -- node2\n"
    )


@pytest.mark.parametrize("name", profiles.names())
def test_round_trip_loses_no_digit(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.txt"
    profile = profiles.shipped(name)
    path.write_text(format_graph(Graph.chain(profile)))

    def told(layer: Layer) -> tuple[str, float, float, int, int]:
        return layer.name, layer.forward, layer.backward, layer.bytes, layer.activation_bytes

    assert list(map(told, profiles.find(str(path)).layers)) == list(map(told, profile.layers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 -- A", "no node"),
        ("node1 -- A -- x=1", "line 1: fields missing or unknown: 'forward_compute_time'"),
        (
            "node1 -- A -- " + META.format("x", 0, 0, 0),
            "line 1: field 'forward_compute_time' must be a number, got 'x'",
        ),
        (
            "node1 -- A -- " + META.format(0, "nan", 0, 0),
            "field 'backward_compute_time' must be finite.*got 'nan'",
        ),
        ("node1 -- A -- " + META.format(0, 0, "-1", 0), "field 'activation_size' must be finite.*got '-1'"),
        ("node1 -- A -- " + META.format(0, 0, 0, "[1; y]"), "field 'parameter_size' must be a number"),
        (
            "node1 -- A -- " + META.format(0, 0, 0, 0) + " -- stage_id=x",
            "field 'stage_id' must be a whole number.*got 'x'",
        ),
        ("node1", "line 1: a node is written"),
        ("node1 -- A -- " + META.format(0, 0, 0, 0) + "\n\tnode1 -- node9", "line 2: the edge names 'node9'"),
        ("\n".join(["node1 -- A -- " + META.format(0, 0, 0, 0)] * 2), "line 2: node 'node1' stands twice"),
        ("", "has no layers"),
    ],
)
def test_bad_text_names_file_line_field_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        find(str(path))
    assert str(path) in str(error.value)


def test_cycle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(DIAMOND + "\tnode4 -- node2\n")
    with pytest.raises(ValueError, match="the edges of node4, node2 form a cycle") as error:
        find(str(path))
    assert str(path) in str(error.value)


# Partitioned graphs


def test_a_lower_stage_comes_first() -> None:
    """Both branches are free at once; the one of stage 1 stands first in the file."""
    graph = parse_graph(DIAMOND.replace("93184.000 -- stage_id=0", "93184.000 -- stage_id=1"))
    assert [graph.nodes[number].name for number in graph.order()] == ["node1", "node3", "node2", "node4"]
    assert graph.cuts() == (0, 2)
    assert parse_graph(DIAMOND).cuts() == (0, 3)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (" -- stage_id=0", "", r"3 of 4 nodes \(node1, node2, node3\) have no stage_id; .*gpus=N.txt"),
        (SINK + " -- stage_id=1", SINK, r"1 of 4 nodes \(node4\) have no stage_id"),
        ("stage_id=1", "stage_id=2", "no node has stage_id 1, but one has 2"),
        (
            "93184.000 -- stage_id=0",
            "93184.000 -- stage_id=2",
            "node4 of stage 1 reads node2 of the later stage 2",
        ),
    ],
)
def test_stages_that_are_none(tmp_path: Path, was: str, now: str, message: str) -> None:
    path = tmp_path / "gpus=2.txt"
    path.write_text(DIAMOND.replace(was, now))
    with pytest.raises(ValueError, match=message) as error:
        Graph.load(path).cuts()
    assert str(path) in str(error.value)


def test_a_graph_without_nodes_has_no_stages() -> None:
    with pytest.raises(ValueError, match="0 of 0 nodes"):
        parse_graph("").cuts()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graph.txt: cannot be read"):
        find(str(tmp_path / "graph.txt"))
