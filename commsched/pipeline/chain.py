"""Models as chains of layers that can be cut anywhere: what is alive at a cut is carried to the next stage.

The model's forward is traced once (torch.fx). Modules are opaque, except ``nn.Sequential`` and what the
caller names; a layer is a module with parameters and all that follows it up to the next one.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.fx import Node

# torch.fx patches modules for the whole process while it traces: one trace at a time, and modules that other
# threads call meanwhile compute as ever.
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Looks into the root and into modules of the given classes."""

    def __init__(self, inside: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.inside = inside
        self.thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, self.inside)


class Chain:
    """A model's forward as a list of layers.

    ``names``: of the layers; ``sizes``: bytes of their trainable parameters, each where it is used first.
    ``elements``: the model is a list of modules, and each element is one layer.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inside: Iterable[type[nn.Module]] = (),
        *,
        elements: bool = False,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        try:
            with _TRACING:
                self.graph = _Tracer(() if elements else (nn.Sequential, *inside)).trace(self.model)
        except Exception as error:
            raise ValueError(
                f"the forward of {type(self.model).__name__} cannot be traced, so it cannot be cut"
                f" ({type(error).__name__}: {error}); pass a list of modules that are called one after the"
                " other"
            ) from error
        nodes = list(self.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.arguments = Arguments(self.placeholders)
        self.output = nodes[-1]
        self._body = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._starts = self._layer_starts()
        self.names = tuple(self._name(start) for start in self._starts)
        if elements:
            self._cut_at_nodes()

    def by_node(self) -> Chain:
        """The same model with every traced node as a layer: cuts may stand before any module or function."""
        finer = copy.copy(self)
        finer._cut_at_nodes()
        return finer

    def _cut_at_nodes(self) -> None:
        self._starts = list(range(len(self._body))) or [0]
        self.names = (
            tuple(str(n.target) if n.op == "call_module" else n.name for n in self._body) or self.names
        )

    def __len__(self) -> int:
        return len(self._starts)

    # Layers

    def _layer_starts(self) -> list[int]:
        starts = [place for place, node in enumerate(self._body) if self._has_parameters(node)]
        return [0, *starts[1:]] if starts else [0]

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
        """The traced nodes of layers ``first`` to ``end - 1``."""
        starts = [*self._starts, len(self._body)]
        return self._body[starts[first] : starts[end]]

    def layer_parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that a layer uses, by their names in the model."""
        found: dict[str, nn.Parameter] = {}
        for node in self.layer_nodes(layer, layer + 1):
            if node.op == "call_module":
                module = self.model.get_submodule(str(node.target))
                for name, parameter in module.named_parameters():
                    found[f"{node.target}.{name}"] = parameter
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    value = _attribute(self.model, str(source.target))
                    if isinstance(value, nn.Parameter):
                        found[str(source.target)] = value
        return found

    def layer_sizes(self, without: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Bytes of each layer's trainable parameters; those whose id is in ``without`` do not count."""
        seen = set(without)
        sizes = []
        for layer in range(len(self)):
            mine = {id(p): p for p in self.layer_parameters(layer).values() if p.requires_grad}
            sizes.append(sum(p.numel() * p.element_size() for key, p in mine.items() if key not in seen))
            seen |= set(mine)
        return tuple(sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.layer_sizes()

    def tied(self, cuts: Sequence[int]) -> dict[int, list[int]]:
        """Trainable parameters (by id) that several stages use, and those stages."""
        users: dict[int, list[int]] = {}
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], len(self)])):
            mine = {
                id(p)
                for layer in range(first, end)
                for p in self.layer_parameters(layer).values()
                if p.requires_grad
            }
            for key in mine:
                users.setdefault(key, []).append(stage)
        return {key: stages for key, stages in users.items() if len(stages) > 1}

    # Stages

    def check_cuts(self, cuts: Sequence[int]) -> None:
        if list(cuts) != sorted(set(cuts)) or not cuts or cuts[0] != 0 or cuts[-1] >= len(self):
            raise ValueError(
                f"cuts must start with 0, rise, and stay below the model's {len(self)} layers; got"
                f" {list(cuts)}"
            )

    def even_cuts(self, stages: int) -> tuple[int, ...]:
        """Cuts that give every stage about as many layers."""
        if not 1 <= stages <= len(self):
            raise ValueError(
                f"a model of {len(self)} layers can be cut into 1 to {len(self)} stages, not {stages}"
            )
        return tuple(stage * len(self) // stages for stage in range(stages))

    def stage(self, first: int, end: int) -> fx.GraphModule:
        """Layers ``first`` to ``end - 1`` as a module that takes and returns what is alive at its borders. It
        shares the model's submodules and parameters.
        """
        body = self.layer_nodes(first, end)
        graph = fx.Graph()
        known: dict[Node, Node] = {
            node: graph.placeholder(f"live_{place}") for place, node in enumerate(self.live(first))
        }
        for node in body:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in known:
                    known[source] = graph.node_copy(source)
            known[node] = graph.node_copy(node, known.__getitem__)
        if end == len(self):
            for source in self.output.all_input_nodes:
                if source.op == "get_attr" and source not in known:
                    known[source] = graph.node_copy(source)
            graph.output(fx.map_arg(self.output.args[0], known.__getitem__))
        else:
            graph.output(tuple(known[node] for node in self.live(end)))
        return fx.GraphModule(self.model, graph)

    def live(self, layer: int) -> list[Node]:
        """The values made before a layer and used in it or later, in the order in which they are made."""
        if layer == 0:
            return self.placeholders
        later = {*self.layer_nodes(layer, len(self)), self.output}
        before = [*self.placeholders, *self.layer_nodes(0, layer)]
        return [node for node in before if later & set(node.users)]


class Arguments:
    """The names and defaults of a forward's arguments; holds nothing else of the model."""

    def __init__(self, placeholders: Sequence[Node]) -> None:
        self.names = tuple(str(node.target) for node in placeholders)
        self.defaults = {str(node.target): node.args[0] for node in placeholders if node.args}

    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        """A batch's inputs as the forward's arguments: a dict by name and a tuple by place, where the forward
        takes several.
        """
        if isinstance(inputs, dict) and inputs and set(inputs) <= set(self.names):
            return tuple(inputs[name] if name in inputs else self._default(name) for name in self.names)
        given = tuple(inputs) if isinstance(inputs, (tuple, list)) and len(self.names) > 1 else (inputs,)
        return (*given, *(self._default(name) for name in self.names[len(given) :]))

    def _default(self, name: str) -> Any:
        if name not in self.defaults:
            raise ValueError(f"the model's forward needs an argument {name!r} that the inputs do not have")
        return self.defaults[name]


def split(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    inside: Iterable[type[nn.Module]] = (),
) -> list[fx.GraphModule]:
    """A model's stages as modules: in ``stages`` parts with about as many layers each, or from the layers
    ``cuts`` on. Values that a later stage needs (skip connections, masks) are carried along: a
    stage takes the values alive at its start as arguments and returns those alive at its end as a tuple.
    """
    chain = Chain(model, inside)
    if (stages is None) == (cuts is None):
        raise ValueError("split needs either stages= (how many) or cuts= (the first layer of each)")
    chosen = chain.even_cuts(stages) if stages is not None else tuple(cuts or ())
    chain.check_cuts(chosen)
    return [chain.stage(first, end) for first, end in zip(chosen, [*chosen[1:], len(chain)])]


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
