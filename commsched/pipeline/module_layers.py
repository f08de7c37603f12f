"""The layers of a model whose forward cannot be traced: found by its modules alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Held:
    """A module by its name in the model; not ``whole``: the parameters of its own, without its children."""

    name: str
    module: nn.Module
    whole: bool = True

    def modules(self) -> list[nn.Module]:
        return list(self.module.modules()) if self.whole else [self.module]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model."""
        prefix = f"{self.name}." if self.name else ""
        found = self.module.named_parameters(recurse=self.whole, remove_duplicate=False)
        return {prefix + name: parameter for name, parameter in found}


@dataclass(frozen=True)
class ModuleLayer:
    """A module and, ``borrowed``, those of other layers whose parameters its forward reads too."""

    own: Held
    borrowed: tuple[Held, ...] = ()

    @property
    def parts(self) -> tuple[Held, ...]:
        return self.own, *self.borrowed

    def modules(self) -> list[nn.Module]:
        return [module for part in self.parts for module in part.modules()]

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers."""
        found = [(*module._parameters.values(), *module._buffers.values()) for module in self.modules()]
        return [tensor for tensors in found for tensor in tensors if tensor is not None]

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for part in self.parts for name, parameter in part.parameters().items()}


def in_copy(copied: nn.Module, layer: ModuleLayer) -> ModuleLayer:
    """The same layer of a copy of the model."""

    def held(part: Held) -> Held:
        return replace(part, module=copied.get_submodule(part.name))

    return ModuleLayer(held(layer.own), tuple(map(held, layer.borrowed)))


def skeleton(model: nn.Module, layers: Sequence[ModuleLayer], kept: range) -> nn.Module:
    """A copy of the model that shares the tensors of the layers ``kept`` and of no layer; of other layers'
    tensors it has the shapes. So the rest of the model can be freed.
    """
    mine = {id(tensor) for number in kept for tensor in layers[number].tensors()}
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for layer in layers:
        for tensor in layer.tensors():
            if id(tensor) not in mine:
                shape = torch.empty_like(tensor, device="meta", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
    return copy.deepcopy(model, memo)


def layers_of(model: nn.Module, inside: tuple[type[nn.Module], ...] = ()) -> list[ModuleLayer]:
    """Modules with parameters or saved buffers, in the order in which the model registers them. Lists of
    blocks, modules that have such a list inside, and those of classes ``inside`` are opened; every other
    module stays whole.
    """
    found: list[Held] = []
    _open("", model, found, (*_LISTS, type(model), *inside))
    return [ModuleLayer(held) for held in found]


def _open(name: str, module: nn.Module, found: list[Held], opened: tuple[type[nn.Module], ...]) -> None:
    if not _has_state(module):
        return
    if not (isinstance(module, opened) or has_blocks(module)):
        found.append(Held(name, module))
        return
    if any(value is not None for value in (*module._parameters.values(), *module._buffers.values())):
        found.append(Held(name, module, whole=False))
    for child_name, child in module.named_children():
        _open(f"{name}.{child_name}" if name else child_name, child, found, opened)


def has_blocks(module: nn.Module) -> bool:
    """Whether a list inside holds two modules of one class that have modules with parameters themselves; or
    a module two numbered ones (``b1``, ``b2``) of one class, whose parts have such modules.
    """
    for part in module.modules():
        listed = isinstance(part, _LISTS)
        kinds = []
        for name, child in part.named_children():
            parts = list(child.children())
            if not listed:
                parts = [inner for each in parts for inner in each.children()]
            if any(map(_has_state, parts)):
                kinds.append((type(child), "" if listed else name.rstrip("0123456789")))
        if len(kinds) > len(set(kinds)):
            return True
    return False


def _has_state(module: nn.Module) -> bool:
    return any(
        part._parameters or part._buffers.keys() - part._non_persistent_buffers_set
        for part in module.modules()
    )


def order_of(
    model: nn.Module, layers: Sequence[ModuleLayer], events: Iterable[tuple[str, int, int]]
) -> dict[int, list[str]]:
    """The layers in the order in which a forward runs them, each with the parameters of others that it reads.
    ``events``: see ``Operations``. A layer whose parameters are read only so is left out.
    """
    order: dict[int, None] = {}
    borrowed: dict[int, dict[int, None]] = {}  # by layer the ids of parameters
    running: list[int] = []
    last = -1
    for kind, layer, parameter in events:
        if kind == "call":
            running.append(layer)
            order.setdefault(last := layer)
        elif kind == "return":
            running.pop()
        elif running and layer not in running:
            borrowed.setdefault(running[-1], {})[parameter] = None
        elif not running and layer != last and layer in order:
            borrowed.setdefault(last, {})[parameter] = None
        elif not running:
            order.setdefault(last := layer)
    read = {parameter for found in borrowed.values() for parameter in found}
    for number, layer_ in enumerate(layers):  # what no forward reads stays, at the end
        if not any(id(p) in read for p in layer_.parameters().values()):
            order.setdefault(number)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {number: [names[key] for key in borrowed.get(number, ())] for number in order}


def homes_of(model: nn.Module) -> dict[str, Held]:
    """By name of a parameter the module that has it."""
    return {
        f"{name}.{key}" if name else key: Held(name, module, whole=False)
        for name, module in model.named_modules()
        for key in module._parameters
    }
