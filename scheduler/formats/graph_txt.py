"""Reads and writes PipeDream's and AshPipe's ``graph.txt``: nodes with times in milliseconds and sizes in
bytes, then edges.

    node1 -- Linear -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=9,
    parameter_size=7 node2 -- ReLU() -- forward_compute_time=...
        node1 -- node2

A profile is a chain of layers, so a graph is read in topological order, ties in the order of the file.
Written files keep every digit and name layers by their description; reading one back gives the same layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from heapq import heapify, heappop, heappush
from pathlib import Path

from scheduler.ir.profile import Layer, Profile

_MILLI = -3
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SEPARATOR = " -- "


@dataclass(frozen=True)
class Node:
    """One line of a graph.txt, times in seconds; ``stage`` where the file assigns one."""

    name: str
    description: str
    forward: float
    backward: float
    activation_size: float
    parameter_size: float
    stage: int | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of the file, and edges between their numbers."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def order(self) -> list[int]:
        """Node numbers, every one after all it reads; a ``ValueError`` names the nodes of a cycle."""
        waiting = [0] * len(self.nodes)
        after: list[list[int]] = [[] for _ in self.nodes]
        for source, target in self.edges:
            waiting[target] += 1
            after[source].append(target)
        free = [number for number, count in enumerate(waiting) if not count]
        heapify(free)
        done = []
        while free:
            number = heappop(free)
            done.append(number)
            for target in after[number]:
                waiting[target] -= 1
                if not waiting[target]:
                    heappush(free, target)
        if len(done) < len(self.nodes):
            stuck = [self.nodes[number].name for number, count in enumerate(waiting) if count]
            raise ValueError(f"the edges of {', '.join(stuck[:8])} form a cycle; a graph must have none")
        return done


def read_graph(path: str | Path, update_per_byte: float = 0.0) -> Profile:
    """The profile in a graph.txt; a ``ValueError`` names the file, the line, the field and the value at
    fault.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    return parse_graph_profile(text, path.stem, str(path), update_per_byte)


def parse_graph_profile(
    text: str, name: str, where: str = "graph.txt", update_per_byte: float = 0.0
) -> Profile:
    graph = parse_graph(text, where)
    try:
        layers = tuple(_layer(graph.nodes[number]) for number in graph.order())
        return Profile(name, layers, update_per_byte, f"imported from {where}")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def parse_graph(text: str, where: str = "graph.txt") -> Graph:
    """The nodes and edges of a graph.txt as they stand there."""
    nodes: dict[str, tuple[int, Node]] = {}
    edges: list[tuple[int, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        parts = line.strip().split(_SEPARATOR)
        if line[0].isspace() or len(parts) == 2:
            edges.append(_edge(parts, nodes, place))
            continue
        node = _node(parts, place)
        if node.name in nodes:
            raise ValueError(f"{place}: node {node.name!r} stands twice; every node has one line")
        nodes[node.name] = (len(nodes), node)
    return Graph(tuple(node for _, node in nodes.values()), tuple(edges))


def _edge(parts: list[str], nodes: dict[str, tuple[int, Node]], place: str) -> tuple[int, int]:
    if len(parts) != 2:
        raise ValueError(f"{place}: an edge is written 'node1 -- node2', got {_SEPARATOR.join(parts)!r}")
    for name in parts:
        if name not in nodes:
            raise ValueError(f"{place}: the edge names {name!r}, which is no node; nodes stand before edges")
    return nodes[parts[0]][0], nodes[parts[1]][0]


def _node(parts: list[str], place: str) -> Node:
    if len(parts) not in (3, 4):
        raise ValueError(
            f"{place}: a node is written 'name -- description -- {'=…, '.join(_FIELDS)}=…',"
            f" got {len(parts)} parts"
        )
    values = {}
    for item in parts[2].split(", "):
        key, _, value = item.partition("=")
        values[key.strip()] = value
    wrong = [key for key in _FIELDS if key not in values] + [key for key in values if key not in _FIELDS]
    if wrong:
        raise ValueError(f"{place}: fields missing or unknown: {', '.join(map(repr, wrong))}")
    forward, backward, activation, parameter = (_number(values[key], key, place) for key in _FIELDS)
    stage = _stage(parts[3], place) if len(parts) == 4 else None
    return Node(
        parts[0],
        parts[1],
        float(forward.scaleb(_MILLI)),
        float(backward.scaleb(_MILLI)),
        float(activation),
        float(parameter),
        stage,
    )


def _stage(text: str, place: str) -> int:
    value = text.partition("=")[2]
    if not value.strip().isdigit():
        raise ValueError(f"{place}: field 'stage_id' must be a whole number, got {text!r}")
    return int(value)


def _number(text: str, field: str, place: str) -> Decimal:
    """A number, or the sum of several outputs' (``[4.0; 8.0]``). Decimal: changing units loses no digit."""
    try:
        value = sum((Decimal(part.strip()) for part in text.strip().strip("[]").split(";")), Decimal(0))
    except InvalidOperation:
        raise ValueError(f"{place}: field {field!r} must be a number, got {text!r}") from None
    if not value.is_finite() or value < 0:
        raise ValueError(f"{place}: field {field!r} must be finite and at least 0, got {text!r}")
    return value


def _layer(node: Node) -> Layer:
    return Layer(
        node.description,
        node.forward,
        node.backward,
        round(node.parameter_size),
        round(node.activation_size),
    )


def format_graph(profile: Profile) -> str:
    """A profile as a graph.txt: a chain of nodes."""
    nodes = [
        _SEPARATOR.join(
            (
                f"node{number}",
                layer.name.replace("\n", "").replace(_SEPARATOR, " - "),
                f"forward_compute_time={_milliseconds(layer.forward)},"
                f" backward_compute_time={_milliseconds(layer.backward)},"
                f" activation_size={layer.activation_bytes:.1f}, parameter_size={layer.bytes:.3f}",
            )
        )
        for number, layer in enumerate(profile.layers, 1)
    ]
    edges = [f"\tnode{number}{_SEPARATOR}node{number + 1}" for number in range(1, len(profile.layers))]
    return "\n".join([*nodes, *edges]) + "\n"


def _milliseconds(seconds: float) -> str:
    return f"{Decimal(repr(float(seconds))).scaleb(-_MILLI):f}"


def write_graph(profile: Profile, path: str | Path) -> None:
    Path(path).write_text(format_graph(profile))
