"""PipeDream's and AshPipe's files: graphs of layers (``graph.txt``), and stages (``hybrid_conf.json``)."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduler.ir.inputs import LARGEST, InputError, read_text, reading, whole
from scheduler.ir.profile import Layer, Profile

# -- graph.txt and gpus=N.txt --------------------------------------------------------------------------------

# A node is one line: a name, a description, times in milliseconds and sizes in bytes. An edge is one line
# with a tab in front. A partitioned graph (``gpus=N.txt``) is a graph.txt whose nodes also carry a stage::
#
#     node1 -- Conv2d(3, 64) -- forward_compute_time=1.2, ..., parameter_size=7168.000 -- stage_id=0
#     node2 -- ReLU() -- forward_compute_time=0.1, ..., parameter_size=0.000 -- stage_id=1
#         node1 -- node2
#
# A profile is a chain of layers, so a graph is read in topological order: the nodes of a lower stage first,
# then ties in the order of the file. Written files keep every digit, so reading one gives the same layers.

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
        return parse_graph(read_text(path), str(path))

    def profile(self, name: str) -> Profile:
        """The nodes as layers, in the order in which they run."""
        layers = tuple(self.nodes[number].layer for number in self.order())
        with reading(self.where):
            return Profile(name, layers, source=f"imported from {self.where}")

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
            raise InputError(
                f"{self.where}: {some} have no stage_id; a partitioned graph gives every node one: take the"
                " gpus=N.txt that PipeDream's optimizer or `commsched convert` writes, not the profile"
            )
        for source, target in self.edges:
            before, after = self.nodes[source], self.nodes[target]
            if (before.stage or 0) > (after.stage or 0):
                raise InputError(
                    f"{self.where}: {after.name} of stage {after.stage} reads {before.name} of the later"
                    f" stage {before.stage}; edges must lead to the same stage or a later one"
                )
        stages = [self.nodes[number].stage or 0 for number in self.order()]
        numbers = sorted(set(stages))
        for expected, stage in enumerate(numbers):
            if stage != expected:
                raise InputError(
                    f"{self.where}: no node has stage_id {expected}, but one has {numbers[-1]}; stages are"
                    " numbered from 0 without gaps"
                )
        return tuple(map(stages.index, numbers))

    def order(self) -> list[int]:
        """Node numbers in topological order, lower stages first; an ``InputError`` names a cycle's nodes."""
        sorter = TopologicalSorter[int]({number: () for number in range(len(self.nodes))})
        for source, target in self.edges:
            sorter.add(target, source)
        try:
            sorter.prepare()
        except CycleError as error:
            names = ", ".join(self.nodes[number].name for number in sorted(set(error.args[1])))
            raise InputError(
                f"{self.where}: the edges of {names} form a cycle; a graph must have none"
            ) from None
        free: list[tuple[int, int]] = []
        done = []
        while sorter.is_active():
            for number in sorter.get_ready():
                heappush(free, (self.nodes[number].stage or 0, number))
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
            raise InputError(f"{place}: node {node.name!r} stands twice; every node has one line")
        nodes[node.name] = (len(nodes), node)
    return Graph(tuple(node for _, node in nodes.values()), tuple(edges), where)


def _edge(parts: list[str], nodes: dict[str, tuple[int, Node]], place: str) -> tuple[int, int]:
    if len(parts) != 2:
        raise InputError(f"{place}: an edge is written 'node1 -- node2', got {_SEPARATOR.join(parts)!r}")
    for name in parts:
        if name not in nodes:
            raise InputError(f"{place}: the edge names {name!r}, which is no node; nodes stand before edges")
    return nodes[parts[0]][0], nodes[parts[1]][0]


def _node(parts: list[str], place: str) -> Node:
    if len(parts) not in (3, 4):
        raise InputError(
            f"{place}: a node is written 'name -- description -- {'=…, '.join(_FIELDS)}=…',"
            f" got {len(parts)} parts"
        )
    values = {}
    for item in parts[2].split(", "):
        key, _, value = item.partition("=")
        values[key.strip()] = value
    wrong = [key for key in _FIELDS if key not in values] + [key for key in values if key not in _FIELDS]
    if wrong:
        raise InputError(f"{place}: fields missing or unknown: {', '.join(map(repr, wrong))}")
    forward, backward, activation, parameter = (_number(values[key], key, place) for key in _FIELDS)
    stage = None
    if len(parts) == 4:
        stage = whole(parts[3].partition("=")[2].strip(), f"{place}: field 'stage_id'")
    seconds = [float(time.scaleb(_MILLI)) for time in (forward, backward)]
    layer = Layer(parts[1], seconds[0], seconds[1], round(parameter), round(activation))
    return Node(parts[0], layer, stage)


def _number(text: str, field: str, place: str) -> Decimal:
    """A number, or the sum of several outputs' (``[4.0; 8.0]``). Decimal: changing units loses no digit."""
    try:
        value = sum((Decimal(part.strip()) for part in text.strip().strip("[]").split(";")), Decimal(0))
    except ArithmeticError:
        raise InputError(f"{place}: field {field!r} must be a number, got {text!r}") from None
    if not value.is_finite() or not 0 <= value <= LARGEST:
        raise InputError(f"{place}: field {field!r} must be finite, 0 to {LARGEST:,}, got {text!r}")
    return value


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


# -- hybrid_conf.json, also dp_conf.json and mp_conf.json ----------------------------------------------------

# An entry of ``module_to_stage_map`` is one stage module of the partitioned graph, not a layer of the model;
# the last entry is the loss. So the file says which ranks hold which stage, and the partitioned graph
# (``gpus=N.txt``) says which layers a stage module has::
#
#     {"module_to_stage_map": [0, 1, 1],                   # two stage modules and the loss
#      "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},    # three replicas of the first
#      "stage_to_depth_map": {"0": 1, "1": 0},             # minibatches that a stage is ahead (optional)
#      "recompute_stage": []}                              # AshPipe's (optional)

OURS = "commsched"
"""Our own field, for the parts of a plan that the format has no field for; other runtimes ignore it."""


@dataclass(frozen=True)
class HybridConf:
    """``modules``: the stage of each stage module, without the loss. ``ranks``: of each stage. ``depths``:
    how many minibatches each stage is ahead, None where the file does not say. ``recompute``: by stage.
    """

    modules: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = ()
    ours: Mapping[str, Any] = field(default_factory=dict)
    where: str = "hybrid_conf.json"

    @property
    def stages(self) -> int:
        return len(self.ranks)

    def cuts(self, starts: Sequence[int], graph: str) -> tuple[int, ...]:
        """The first layer of each stage, from that of each stage module in ``graph``."""
        if len(starts) != len(self.modules):
            raise InputError(
                f"{self.where}: field 'module_to_stage_map' has {len(self.modules) + 1} entries, so it is for"
                f" {len(self.modules)} stage modules and the loss, but {graph} has {len(starts)} stages; take"
                " two files of the same conversion"
            )
        return tuple(starts[self.modules.index(stage)] for stage in range(self.stages))

    def cuts_alone(self, layers: int) -> tuple[int, ...]:
        """The first layer of each stage of a model, without the graph: only where all layers are in one
        stage, or there is one stage module for each layer.
        """
        if self.stages == 1:
            return (0,)
        if len(self.modules) == layers:
            return self.cuts(range(layers), "the model")
        raise InputError(
            f"{self.where}: field 'module_to_stage_map' puts {len(self.modules)} stage modules (and the loss)"
            f" into {self.stages} stages; which of the model's {layers} layers are in which module stands in"
            " the partitioned graph only: give it with --graph gpus=N.txt (the optimizers of PipeDream and"
            " AshPipe and `commsched convert` write it)"
        )

    def text(self) -> str:
        numbered = {"stage_to_rank_map": self.ranks, "stage_to_depth_map": self.depths}
        data = {
            "module_to_stage_map": [*self.modules, self.modules[-1]],
            **{
                name: {str(stage): value for stage, value in enumerate(values)}
                for name, values in numbered.items()
                if values is not None
            },
            "recompute_stage": [stage for stage, again in enumerate(self.recompute) if again],
            **({OURS: self.ours} if self.ours else {}),
        }
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
        return f"{{\n{lines}\n}}\n"


def parse_hybrid_conf(data: Any, where: str = "hybrid_conf.json") -> HybridConf:
    """Read the JSON data of a file; an ``InputError`` names the file, the field and the wrong value."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(data).__name__}")
    modules = _modules(data, where)
    stages = modules[-1] + 1
    depths = data.get("stage_to_depth_map")
    if depths is not None:
        rows = _by_stage(data, "stage_to_depth_map", stages, where)
        if not all(type(row) is int and row >= 0 for row in rows):
            raise InputError(f"{where}: field 'stage_to_depth_map' must have whole numbers, got {depths!r}")
    again = _numbers(data.get("recompute_stage") or [], "recompute_stage", where)
    if again and max(again) >= stages:
        raise InputError(f"{where}: field 'recompute_stage' names stages 0 to {stages - 1}, got {again}")
    ours = data.get(OURS, {})
    if not isinstance(ours, dict):
        raise InputError(f"{where}: field {OURS!r} must be an object, got {ours!r}")
    return HybridConf(
        modules=modules,
        ranks=_ranks(data, stages, where),
        depths=None if depths is None else tuple(rows),
        recompute=tuple(stage in again for stage in range(stages)),
        ours=ours,
        where=where,
    )


def _modules(data: Mapping[str, Any], where: str) -> tuple[int, ...]:
    stages = _numbers(data.get("module_to_stage_map"), "module_to_stage_map", where)
    if len(stages) < 2 or stages[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(stages)):
        raise InputError(
            f"{where}: field 'module_to_stage_map' must start with stage 0, rise by at most 1 and end with"
            f" the loss, got {stages}"
        )
    *modules, loss = stages
    if loss != modules[-1]:
        raise InputError(
            f"{where}: the last entry of field 'module_to_stage_map' is the loss, and stage {loss} would have"
            f" nothing else; put it into stage {modules[-1]}, with the last stage module"
        )
    return tuple(modules)


def _ranks(data: Mapping[str, Any], stages: int, where: str) -> tuple[tuple[int, ...], ...]:
    name = "stage_to_rank_map"
    ranks = [
        tuple(_numbers(row, f"{name}[{stage}]", where))
        for stage, row in enumerate(_by_stage(data, name, stages, where))
    ]
    if not all(ranks):
        raise InputError(f"{where}: field {name!r} gives stage {ranks.index(())} no rank; each needs one")
    uses = Counter(rank for row in ranks for rank in row)
    twice = [rank for rank, count in uses.items() if count > 1]
    if twice:
        users = [stage for stage, row in enumerate(ranks) if twice[0] in row]
        raise InputError(
            f"{where}: field {name!r} uses rank {twice[0]} twice (stages {users}); a rank holds one stage"
        )
    missing = sorted(set(range(len(uses))) - set(uses))
    if missing:
        raise InputError(
            f"{where}: field {name!r} names {len(uses)} ranks, so they must be 0 to {len(uses) - 1};"
            f" {', '.join(map(str, missing))} missing, got {sorted(uses)}"
        )
    return tuple(ranks)


def _by_stage(data: Mapping[str, Any], name: str, stages: int, where: str) -> list[Any]:
    entries = data.get(name)
    names = [str(stage) for stage in range(stages)]
    if not isinstance(entries, dict) or set(entries) != set(names):
        raise InputError(
            f"{where}: field {name!r} must have an entry for each of the stages 0 to {stages - 1} of"
            f" 'module_to_stage_map', got {entries!r}"
        )
    return [entries[stage] for stage in names]


def _numbers(values: Any, field: str, where: str) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise InputError(f"{where}: field {field!r} must be a list of whole numbers, got {values!r}")
    return values
