"""The arguments of a model's forward, from the inputs of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Arguments:
    """The names and defaults of a forward's arguments."""

    names: tuple[str, ...]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Arguments:
        """The arguments in a forward's signature that have a name."""
        named = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        known = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in named]
        return cls(
            tuple(p.name for p in known),
            {p.name: p.default for p in known if p.default is not inspect.Parameter.empty},
        )

    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        """A batch's inputs as the forward's arguments: a dict by name and a tuple by place, where the forward
        takes several.
        """
        if isinstance(inputs, dict) and inputs and set(inputs) <= set(self.names):
            return tuple(inputs[name] if name in inputs else self._default(name) for name in self.names)
        given = tuple(inputs) if isinstance(inputs, (tuple, list)) and len(self.names) > 1 else (inputs,)
        return (*given, *(self._default(name) for name in self.names[len(given) :]))

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name, without those that are None."""
        return {name: value for name, value in zip(self.names, values) if value is not None}

    def named(self, inputs: Any) -> dict[str, Any]:
        """A batch's inputs by name."""
        return self.by_name(self(inputs))

    def _default(self, name: str) -> Any:
        if name not in self.defaults:
            raise ValueError(f"the model's forward needs an argument {name!r} that the inputs do not have")
        return self.defaults[name]
