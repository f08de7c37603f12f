"""Models as chains of layers that can be cut anywhere.

Where torch.fx can trace a model's forward, a stage is a part of its graph (``traced_forward``). Where it
cannot, a layer is a module, and a stage runs the model's own forward, with the other stages' values absent
(``stage_forward``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from commsched.pipeline.arguments import Arguments
from commsched.pipeline.stage_forward import ModuleForward
from commsched.pipeline.traced_forward import TracedForward


class Chain:
    """A model's forward as a list of layers.

    ``names``: of the layers; ``sizes``: bytes of their trainable parameters, each where it is used first.
    ``inside``: classes of modules that a trace looks into. ``example``: inputs of a batch, for models that
    cannot be traced. ``elements``: the model is a list of modules, and each element is one layer.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inside: Iterable[type[nn.Module]] = (),
        example: Any = None,
        *,
        elements: bool = False,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self._forward = _forward_of(self.model, tuple(inside), example, elements)

    @property
    def names(self) -> tuple[str, ...]:
        return self._forward.names

    @property
    def arguments(self) -> Arguments:
        return self._forward.arguments

    def by_node(self) -> Chain:
        """The same model with every node of a traced forward as a layer; else with the same layers."""
        if not isinstance(self._forward, TracedForward):
            return self
        finer = copy.copy(self)
        finer._forward = self._forward.by_node()
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

    def stage(self, first: int, end: int) -> nn.Module:
        """Layers ``first`` to ``end - 1`` as a module that takes and returns the values that cross its
        borders. It shares the model's submodules and parameters.
        """
        return self._forward.stage(first, end)


def _forward_of(
    model: nn.Module, inside: tuple[type[nn.Module], ...], example: Any, elements: bool
) -> TracedForward | ModuleForward:
    try:
        return TracedForward(model, inside, elements)
    except Exception as error:
        found = ModuleForward(model, example)
        if not inside and len(found.names) > 1:
            return found
        raise ValueError(
            f"the forward of {type(model).__name__} cannot be traced, so it cannot be cut"
            f" ({type(error).__name__}: {error}); pass a list of modules that are called one after the"
            " other"
        ) from error


def split(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    *,
    cuts: Sequence[int] | None = None,
    inside: Iterable[type[nn.Module]] = (),
    example: Any = None,
) -> list[nn.Module]:
    """A model's stages as modules: in ``stages`` parts with about as many layers each, or from the layers
    ``cuts`` on. What a later stage needs of an earlier one (skip connections, masks) is carried along: a
    stage takes what is alive at its start as arguments and returns what is alive at its end as a tuple.
    """
    chain = Chain(model, inside, example)
    if (stages is None) == (cuts is None):
        raise ValueError("split needs either stages= (how many) or cuts= (the first layer of each)")
    chosen = chain.even_cuts(stages) if stages is not None else tuple(cuts or ())
    chain.check_cuts(chosen)
    return [chain.stage(first, end) for first, end in zip(chosen, [*chosen[1:], len(chain)])]
