"""Models as chains of layers that can be cut anywhere.

A layer is a module, and a stage runs the model's own forward with the other stages' values absent
(``stage_forward``). Of an ``nn.Sequential`` it calls its modules, which is the same and quicker.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.factory import Make
from commsched.pipeline.module_layers import has_blocks
from commsched.pipeline.origin import Origin, WeightSource
from commsched.pipeline.stage_forward import ModuleForward, StageForward


class Chain:
    """A model's forward as a list of layers.

    ``names``: of the layers; ``sizes``: bytes of their trainable parameters, each where it is used first.
    ``inside``: classes of modules that may be cut, beside lists of blocks and what holds them. ``example``:
    inputs of a batch, for models that register their layers in another order than they run them.
    ``elements``: the model is a list of modules, and each element is one layer.

    ``model`` may also be a function that makes it, or on the meta device with ``weights`` to read: then
    parameters are shapes until ``fill`` gives some of them their values.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Make,
        inside: Iterable[type[nn.Module]] = (),
        example: Any = None,
        *,
        elements: bool = False,
        weights: WeightSource | None = None,
    ) -> None:
        self.origin = Origin(model, weights)
        self.model = self.origin.model
        self._run_by(_forward_of(self.model, tuple(inside), example, elements))

    def _run_by(self, forward: ListForward | ModuleForward) -> None:
        self._forward, self.names, self.arguments = forward, forward.names, forward.arguments

    def fill(self, parts: Iterable[range], random: Tensor, device: torch.device | str | None = None) -> None:
        """Gives the layers of these parts, and what belongs to no layer, their values. ``random``: the state
        of torch's generator with which a factory begins.
        """
        if not self.origin.complete:
            rest = self.model.state_dict().keys() - self.stage(0, len(self)).state_dict().keys()
            mine = {name for part in parts for name in self.stage(part.start, part.stop).state_dict()}
            self.origin.fill(rest | mine, random, device)

    def by_node(self) -> Chain:
        """The same model with every module of an ``nn.Sequential`` as a layer; else with the same layers."""
        if not isinstance(self._forward, ListForward):
            return self
        finer = copy.copy(self)
        finer._run_by(ListForward(self._forward.modules, each=True))
        return finer

    def __len__(self) -> int:
        return len(self.names)

    def layer_parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that a layer uses, by their names in the model."""
        return self._forward.parameters(layer)

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

    def tied(self, cuts: Sequence[int]) -> dict[int, dict[int, str]]:
        """Trainable parameters (by id) that several stages use, and those stages, each with the parameter's
        name there. All ranks get them in the same order: they sum their gradients in it.

        Only before stages are made: these exchange the parameters of the model's modules.
        """
        users: dict[int, dict[int, str]] = {}
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], len(self)])):
            for layer in range(first, end):
                for name, parameter in self.layer_parameters(layer).items():
                    if parameter.requires_grad:
                        users.setdefault(id(parameter), {}).setdefault(stage, name)
        return {key: stages for key, stages in users.items() if len(stages) > 1}

    def first_names(self) -> dict[str, str]:
        """By every name of a parameter the one that ``named_parameters`` of the model has: tied parameters
        have several. Only before stages are made, like ``tied``.
        """
        first: dict[int, str] = {}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first.setdefault(id(parameter), name) for name, parameter in every}

    def cuts(self, cuts: Sequence[int | str]) -> tuple[int, ...]:
        """The first layer of each stage. ``cuts``: numbers from 0 on, or names of the modules with which the
        later stages begin.
        """
        found = [self._layer_of(cut) if isinstance(cut, str) else cut for cut in cuts]
        if cuts and isinstance(cuts[0], str) and found[0] != 0:
            found = [0, *found]
        if found != sorted(set(found)) or not found or found[0] != 0 or found[-1] >= len(self):
            raise ValueError(
                f"cuts must start with 0, rise, and stay below the model's {len(self)} layers; got"
                f" {list(cuts)}"
            )
        return tuple(found)

    def _layer_of(self, name: str) -> int:
        for layer, own in enumerate(self.names):
            if own == name or own.startswith(f"{name}."):
                return layer
        raise ValueError(
            f"no layer is named {name!r} or stands in a module of that name; the layers are"
            f" {', '.join(self.names)}"
        )

    def even_cuts(self, stages: int) -> tuple[int, ...]:
        """Cuts that give every stage about as many layers."""
        if not 1 <= stages <= len(self):
            raise ValueError(
                f"a model of {len(self)} layers (modules with parameters) cannot be cut into {stages} stages;"
                " pass inside= (classes of modules that may be cut), or a list of modules"
            )
        return tuple(stage * len(self) // stages for stage in range(stages))

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers ``first`` to ``end - 1`` as a module that takes and returns the values that cross its
        borders. It shares the model's submodules and parameters.
        """
        return self._forward.stage(first, end)


class ListForward:
    """Modules called one after the other. A layer is one with parameters and all that follow it up to the
    next such; with ``each``, every module.
    """

    arguments = Arguments(("input",), {})

    def __init__(self, modules: dict[str, nn.Module], each: bool = False) -> None:
        self.modules, self._names = modules, list(modules)
        full = [place for place, name in enumerate(modules) if each or _has_parameters(modules[name])]
        self._starts = [0, *full[1:]]
        self.names = tuple(self._names[place] for place in full or [0])

    def _part(self, first: int, end: int) -> dict[str, nn.Module]:
        starts = [*self._starts, len(self._names)]
        return {name: self.modules[name] for name in self._names[starts[first] : starts[end]]}

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{key}": parameter
            for name, module in self._part(layer, layer + 1).items()
            for key, parameter in module.named_parameters(remove_duplicate=False)
        }

    def stage(self, first: int, end: int) -> nn.Module:
        return ListStage(self._part(first, end), end == len(self.names))


class ListStage(nn.Module):
    """Some modules of a list, under their names in the model; returns a tuple where others follow."""

    def __init__(self, modules: dict[str, nn.Module], last: bool) -> None:
        super().__init__()
        self._stage_calls, self._stage_last = list(modules.values()), last
        self._stage_writes: dict[bool, bool] = {}
        for name, module in modules.items():
            parent: nn.Module = self
            *path, own = name.split(".")
            for part in path:
                parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            parent._modules[own] = module

    def forward(self, value: Any) -> Any:
        """Autograd allows no writing to what came from another stage, and recomputation reads it again: a
        stage that begins with an operation in place works on a copy. The first forward of each mode shows
        whether it does.
        """
        mode = next((module.training for module in self._stage_calls), False)
        copies: list[Tensor] = []
        if self._stage_writes.get(mode, True):
            value = tree_map_only(Tensor, partial(_copied, copies), value)
        result = value
        for module in self._stage_calls:
            result = module(result)
        if copies and mode not in self._stage_writes:
            self._stage_writes[mode] = any(copied._version for copied in copies)
        return result if self._stage_last else (result,)


def _copied(copies: list[Tensor], value: Tensor) -> Tensor:
    if value.is_leaf:
        copies.append(value := value.clone())
    return value


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _plain_modules(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The modules that an ``nn.Sequential`` calls, by name; none where it does more, or where one of them is
    to be opened.
    """
    if type(model) is not nn.Sequential or any(vars(model)[name] for name in vars(model) if "_hooks" in name):
        return {}
    found: dict[str, nn.Module] = {}
    for name, part in model._modules.items():
        assert part is not None
        opened = type(part) is nn.Sequential and len(part) > 0
        inner = _plain_modules(part, f"{prefix}{name}.") if opened else {}
        if not inner and (opened or has_blocks(part)):
            return {}
        found |= inner or {f"{prefix}{name}": part}
    return found


def reads(stage: nn.Module) -> tuple[list[nn.Module], list[str]]:
    """The modules that a stage calls, in that order, and the names of parameters that it reads itself."""
    if isinstance(stage, StageForward):
        return stage.reads()
    assert isinstance(stage, ListStage)
    return stage._stage_calls, []


def _forward_of(
    model: nn.Module, inside: tuple[type[nn.Module], ...], example: Any, elements: bool
) -> ListForward | ModuleForward:
    if elements:
        return ListForward(
            {name: part for name, part in model._modules.items() if part is not None}, each=True
        )
    if modules := _plain_modules(model):
        return ListForward(modules)
    return ModuleForward(model, example, inside)


def split(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    *,
    cuts: Sequence[int | str] | None = None,
    inside: Iterable[type[nn.Module]] = (),
    example: Any = None,
) -> list[nn.Module]:
    """A model's stages as modules: in ``stages`` parts with about as many layers each, or from the layers
    ``cuts`` on. Values that a later stage needs (skip connections, masks) are carried along: a
    stage takes the values alive at its start as arguments and returns those alive at its end as a tuple.
    """
    chain = Chain(model, inside, example)
    if (stages is None) == (cuts is None):
        raise ValueError("split needs either stages= (how many) or cuts= (the first layer of each)")
    chosen = chain.even_cuts(stages) if stages is not None else chain.cuts(cuts or ())
    return [chain.stage(first, end) for first, end in zip(chosen, [*chosen[1:], len(chain)])]
