"""The layers of a model whose forward cannot be traced: found by its modules alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.partial_forward import PartialForward, StageForward


@dataclass(frozen=True)
class ModuleLayer:
    """A module and its name; not ``whole``: only the parameters of its own, its children are layers themselves."""

    name: str
    module: nn.Module
    whole: bool = True

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model."""
        prefix = f"{self.name}." if self.name else ""
        found = self.module.named_parameters(recurse=self.whole, remove_duplicate=False)
        return {prefix + name: parameter for name, parameter in found}


def layers_of(model: nn.Module) -> list[ModuleLayer]:
    """Modules with parameters, in the order in which the model registers them. Lists of blocks, and modules that have
    such a list inside, are opened; every other module stays whole.
    """
    found: list[ModuleLayer] = []
    _open("", model, found, True)
    return found


def _open(name: str, module: nn.Module, found: list[ModuleLayer], root: bool = False) -> None:
    if not _has_parameters(module):
        return
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    if not (root or listed or _has_blocks(module)):
        found.append(ModuleLayer(name, module))
        return
    if any(True for _ in module.parameters(recurse=False)):
        found.append(ModuleLayer(name, module, whole=False))
    for child_name, child in module.named_children():
        _open(f"{name}.{child_name}" if name else child_name, child, found)


def _has_blocks(module: nn.Module) -> bool:
    """Whether a list inside holds two modules of one class that have modules with parameters themselves."""
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for child in part.children() if any(map(_has_parameters, child.children()))]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


class ModuleForward:
    """A forward in layers that are modules; a stage runs it with the other layers' values absent."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = layers_of(model)
        self.names = tuple(layer.name or type(model).__name__ for layer in self.layers)
        self.arguments = Arguments.of(model)
        self._whole = PartialForward(model, [(layer.module, layer.whole) for layer in self.layers])

    def parameters(self, layer: int) -> dict[str, nn.Parameter]:
        return self.layers[layer].parameters()

    def stage(self, first: int, end: int) -> nn.Module:
        names = [layer.name for layer in self.layers]
        return StageForward(self._whole, range(first, end), self.arguments.names, names)
