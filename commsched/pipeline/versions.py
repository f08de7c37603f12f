"""Weight versions of one stage on one rank.

A version is a set of tensors of its own; the module gets the version it is to compute with by exchanging its
parameters, so nothing that is in flight is ever written to. A step writes into the tensors of a version that
nothing needs any more, or into new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Slot = tuple[dict[str, nn.Parameter | None], str]
"""A module's dictionary of parameters, and the key of one."""


class Version:
    """The weights after ``number`` steps. ``pending``: buckets whose all-gather has not been taken in."""

    def __init__(self, number: int, leaves: list[nn.Parameter]) -> None:
        self.number, self.leaves = number, leaves
        self.pending: set[int] = set()

    @property
    def data(self) -> list[Tensor]:
        return [leaf.data for leaf in self.leaves]


class Versions:
    """The trainable parameters of a stage, by name, in all versions that something may still need.

    ``modules``: the stage's, and copies that share its parameters. ``own_parameters``: the first version is
    the caller's own parameters and no copies of them.
    """

    def __init__(self, modules: Sequence[nn.Module], own_parameters: bool = False) -> None:
        self.slots: dict[str, list[Slot]] = {}
        by_id: dict[int, str] = {}
        leaves: list[nn.Parameter] = []
        self.places: dict[str, int] = {}  # of every name in the leaves
        # Shared parameters have one name and several slots.
        every = [found for module in modules for found in module.named_modules(remove_duplicate=False)]
        for prefix, part in every:
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                path = f"{prefix}.{key}" if prefix else key
                name = by_id.setdefault(id(parameter), path)
                if name not in self.slots:
                    self.slots[name] = []
                    leaves.append(parameter)
                self.slots[name].append((part._parameters, key))
                self.places[path] = self.places.get(name, len(leaves) - 1)
        self.names = tuple(self.slots)
        if not own_parameters:
            # Hooks and gradients of the caller's parameters stay out of the pipeline.
            leaves = [nn.Parameter(leaf.detach().contiguous()) for leaf in leaves]
        first = Version(0, leaves)
        self.live: dict[int, Version] = {0: first}
        self.newest = first
        self._free: list[list[nn.Parameter]] = []
        self._in_use: Version | None = None
        self.most = 1
        self.use(first)

    def use(self, version: Version) -> None:
        """Makes the module compute with this version."""
        if version is self._in_use:
            return
        for slots, leaf in zip(self.slots.values(), version.leaves, strict=True):
            for parameters, key in slots:
                parameters[key] = leaf
        self._in_use = version

    def advance(self, needed: Callable[[int], bool]) -> Version:
        """The tensors for the next version. They are the newest version's own where ``needed`` says that
        nothing will compute with it again; otherwise they hold a copy of it.
        """
        for number in [n for n in self.live if n != self.newest.number and not needed(n)]:
            self._free.append(self.live.pop(number).leaves)
        old = self.newest
        if needed(old.number):
            leaves = self._free.pop() if self._free else [_like(leaf) for leaf in old.leaves]
            new = Version(old.number + 1, leaves)
            if leaves:
                torch._foreach_copy_(new.data, old.data)
        else:
            del self.live[old.number]
            new = Version(old.number + 1, old.leaves)
        self.live[new.number] = self.newest = new
        self.most = max(self.most, len(self.live))
        return new

    def reset(self, number: int) -> None:
        """The newest version becomes number ``number``, and the only one."""
        self.live = {number: self.newest}
        self.newest.number = number
        self.use(self.newest)


def _like(leaf: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(leaf))
