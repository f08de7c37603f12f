"""A model's forward as a graph, traced once by torch.fx.

Modules are opaque, except ``nn.Sequential``, modules with a list of blocks inside, and what the caller names;
a layer is a module with parameters and all that follows it up to the next one. What is alive at a cut is
carried to the next stage.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.fx import Node

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.module_layers import has_blocks

# torch.fx patches modules for the whole process while it traces: one trace at a time, and modules that other
# threads call meanwhile compute as ever.
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Looks into the root, into modules of the given classes, and where there are blocks, if it may."""

    def __init__(self, inside: tuple[type[nn.Module], ...], blocks: bool) -> None:
        super().__init__()
        self.inside, self.blocks = inside, blocks
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, self.inside) and not (self.blocks and has_blocks(m))


class TracedForward:
    """The layers of a traced forward. ``names``: of the layers. ``elements``: the model is a list of modules,
    and each element is one layer.
    """

    def __init__(
        self, model: nn.Module, inside: tuple[type[nn.Module], ...] = (), elements: bool = False
    ) -> None:
        self.model = model
        opened = () if elements else (nn.Sequential, *inside)
        self.graph = _traced(model, lambda: _Tracer(opened, not elements))
        nodes = list(self.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.arguments = Arguments(
            tuple(str(node.target) for node in self.placeholders),
            {str(node.target): node.args[0] for node in self.placeholders if node.args},
        )
        self.output = nodes[-1]
        self._body = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        starts = [place for place, node in enumerate(self._body) if self._has_parameters(node)]
        self._starts = [0, *starts[1:]]
        self.names = tuple(self._name(start) for start in self._starts)
        if elements:
            self._cut_at_nodes()

    def by_node(self) -> TracedForward:
        """The same forward with every node as a layer: cuts may stand before any module or function."""
        finer = copy.copy(self)
        finer._cut_at_nodes()
        return finer

    def _cut_at_nodes(self) -> None:
        self._starts = list(range(len(self._body))) or [0]
        self.names = (
            tuple(str(n.target) if n.op == "call_module" else n.name for n in self._body) or self.names
        )

    def _has_parameters(self, node: Node) -> bool:
        if node.op == "call_module":
            return any(True for _ in self.model.get_submodule(str(node.target)).parameters())
        return any(source.op == "get_attr" for source in node.all_input_nodes)

    def _name(self, start: int) -> str:
        node = self._body[start] if self._body else self.output
        for candidate in self._body[start:]:
            if self._has_parameters(candidate):
                node = candidate
                break
        return str(node.target) if node.op == "call_module" else node.name

    def layer_nodes(self, first: int, end: int) -> list[Node]:
        """What layers ``first`` to ``end - 1`` compute."""
        starts = [*self._starts, len(self._body)]
        return self._body[starts[first] : starts[end]]

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that a layer uses, by their names in the model."""
        found: dict[str, nn.Parameter] = {}
        for node in self.layer_nodes(layer, layer + 1):
            if node.op == "call_module":
                module = self.model.get_submodule(str(node.target))
                for name, parameter in module.named_parameters():
                    found[f"{node.target}.{name}"] = parameter
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    value = attrgetter(str(source.target))(self.model)
                    if isinstance(value, nn.Parameter):
                        found[str(source.target)] = value
        return found

    def stage(self, first: int, end: int) -> fx.GraphModule:
        """Layers ``first`` to ``end - 1`` as a module that takes and returns what is alive at its borders. It
        shares the model's submodules and parameters.
        """
        body = self.layer_nodes(first, end)
        graph = fx.Graph()
        known: dict[Node, Node] = {
            node: graph.placeholder(f"live_{place}") for place, node in enumerate(self.live(first))
        }
        for node in [*body, self.output] if end == len(self.names) else body:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in known:
                    known[source] = graph.node_copy(source)
            known[node] = graph.node_copy(node, known.__getitem__)
        if end < len(self.names):
            graph.output(tuple(known[node] for node in self.live(end)))
        return fx.GraphModule(self.model, graph)

    def live(self, layer: int) -> list[Node]:
        """The values made before a layer and used in it or later, in the order in which they are made."""
        if layer == 0:
            return self.placeholders
        later = {*self.layer_nodes(layer, len(self.names)), self.output}
        before = [*self.placeholders, *self.layer_nodes(0, layer)]
        return [node for node in before if later & set(node.users)]


def _traced(model: nn.Module, tracer: Callable[[], _Tracer]) -> fx.Graph:
    """The graph, if it is the same in training and in evaluation: a trace holds one of two branches."""
    with _TRACING:
        graph, modules = tracer().trace(model), list(model.modules())
        modes = [module.training for module in modules]
        try:
            for module in modules:
                module.training = not module.training
            other = tracer().trace(model)
        finally:
            for module, mode in zip(modules, modes):
                module.training = mode
    if str(graph) != str(other):
        raise ValueError("the forward computes other things in training than in evaluation")
    return graph
