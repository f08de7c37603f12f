"""Reads and writes PipeDream's and AshPipe's ``graph.txt`` and ``gpus=N.txt``.

A node is one line: a name, a description, times in milliseconds and sizes in bytes. An edge is one line with
a tab in front. A partitioned graph (``gpus=N.txt``) is a graph.txt whose nodes also carry a stage::

    node1 -- Conv2d(3, 64) -- forward_compute_time=1.2, ..., parameter_size=7168.000 -- stage_id=0
    node2 -- ReLU() -- forward_compute_time=0.1, ..., parameter_size=0.000 -- stage_id=1
        node1 -- node2

A profile is a chain of layers, so a graph is read in topological order: the nodes of a lower stage first,
then ties in the order of the file. Written files keep every digit, so reading one gives the same layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path

from scheduler.ir.profile import Layer, Profile

_MILLI = -3
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SEPARATOR = " -- "


@dataclass(frozen=True)
class Node:
    """One line of a graph.txt; ``stage`` where the file assigns one."""

    name: str
    layer: Layer
    stage: int | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of the file, and edges between their numbers. ``where`` names it in errors."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    where: str = "graph.txt"

    @classmethod
    def chain(cls, profile: Profile) -> Graph:
        """The layers of a profile, each reading the one before."""
        nodes = tuple(Node(f"node{n}", layer) for n, layer in enumerate(profile.layers, 1))
        return cls(nodes, tuple(pairwise(range(len(nodes)))))

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from None
        return parse_graph(text, str(path))

    def profile(self, name: str) -> Profile:
        """The nodes as layers, in the order in which they run."""
        layers = tuple(self.nodes[number].layer for number in self.order())
        try:
            return Profile(name, layers, source=f"imported from {self.where}")
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def with_stages(self, cuts: Sequence[int]) -> Graph:
        """The same graph, its nodes in the order in which they run, in stages that start at ``cuts``."""
        order = self.order()
        place = {number: at for at, number in enumerate(order)}
        nodes = [
            replace(self.nodes[number], stage=bisect_right(cuts, at) - 1) for at, number in enumerate(order)
        ]
        edges = tuple((place[source], place[target]) for source, target in self.edges)
        return Graph(tuple(nodes), edges, self.where)

    def cuts(self) -> tuple[int, ...]:
        """The first node of each stage, counted in the order in which the nodes run."""
        without = [node.name for node in self.nodes if node.stage is None]
        if without or not self.nodes:
            some = f"{len(without)} of {len(self.nodes)} nodes ({', '.join(without[:8])})"
            raise ValueError(
                f"{self.where}: {some} have no stage_id; a partitioned graph gives every node one: take the"
                " gpus=N.txt that PipeDream's optimizer or `commsched convert` writes, not the profile"
            )
        for source, target in self.edges:
            before, after = self.nodes[source], self.nodes[target]
            if _stage_of(before) > _stage_of(after):
                raise ValueError(
                    f"{self.where}: {after.name} of stage {after.stage} reads {before.name} of the later"
                    f" stage {before.stage}; edges must lead to the same stage or a later one"
                )
        stages = [_stage_of(self.nodes[number]) for number in self.order()]
        missing = sorted(set(range(stages[-1] + 1)) - set(stages))
        if missing:
            raise ValueError(
                f"{self.where}: no node has stage_id {', '.join(map(str, missing))}, but one has"
                f" {stages[-1]}; stages are numbered from 0 without gaps"
            )
        return tuple(stages.index(stage) for stage in range(stages[-1] + 1))

    def order(self) -> list[int]:
        """Node numbers in topological order, lower stages first; a ``ValueError`` names a cycle's nodes."""
        sorter = TopologicalSorter[int]({number: () for number in range(len(self.nodes))})
        for source, target in self.edges:
            sorter.add(target, source)
        try:
            sorter.prepare()
        except CycleError as error:
            names = ", ".join(self.nodes[number].name for number in sorted(set(error.args[1])))
            raise ValueError(
                f"{self.where}: the edges of {names} form a cycle; a graph must have none"
            ) from None
        free: list[tuple[int, int]] = []
        done = []
        while sorter.is_active():
            for number in sorter.get_ready():
                heappush(free, (_stage_of(self.nodes[number]), number))
            done.append(heappop(free)[1])
            sorter.done(done[-1])
        return done


def parse_graph(text: str, where: str = "graph.txt") -> Graph:
    """Parse the nodes and edges of a graph.txt, in the order of the file."""
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
    return Graph(tuple(node for _, node in nodes.values()), tuple(edges), where)


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
    seconds = [float(time.scaleb(_MILLI)) for time in (forward, backward)]
    layer = Layer(parts[1], seconds[0], seconds[1], round(parameter), round(activation))
    return Node(parts[0], layer, stage)


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


def _stage_of(node: Node) -> int:
    return 0 if node.stage is None else node.stage


def format_graph(graph: Graph) -> str:
    """The text of a graph.txt."""
    nodes = [_node_line(node) for node in graph.nodes]
    edges = [
        f"\t{graph.nodes[source].name}{_SEPARATOR}{graph.nodes[target].name}"
        for source, target in graph.edges
    ]
    return "\n".join([*nodes, *edges]) + "\n"


def _node_line(node: Node) -> str:
    layer = node.layer
    parts = [
        node.name,
        layer.name.replace("\n", "").replace(_SEPARATOR, " - "),
        f"forward_compute_time={_milliseconds(layer.forward)},"
        f" backward_compute_time={_milliseconds(layer.backward)},"
        f" activation_size={layer.activation_bytes:.1f}, parameter_size={layer.bytes:.3f}",
    ]
    if node.stage is not None:
        parts.append(f"stage_id={node.stage}")
    return _SEPARATOR.join(parts)


def _milliseconds(seconds: float) -> str:
    return f"{Decimal(repr(float(seconds))).scaleb(-_MILLI):f}"


def write_graph(graph: Graph, path: str | Path) -> None:
    Path(path).write_text(format_graph(graph))
