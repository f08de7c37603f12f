"""The arguments of a model's forward, from the inputs of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import nn

_REST, _EXTRA = "*", "**"  # the keys of what a forward takes as ``*inputs`` and ``**inputs``


@dataclass(frozen=True)
class Arguments:
    """The names and defaults of a forward's arguments. ``placed``: how many can be given by place, and
    ``only_placed``: how many only so. ``rest`` and ``extra``: whether it takes more by place, and by name.
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]
    placed: int = 1
    only_placed: int = 0
    rest: bool = False
    extra: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Arguments:
        found = list(signature(model.forward).parameters.values())
        kinds = [p.kind for p in found]
        named = [p for p in found if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        return cls(
            tuple(p.name for p in named),
            {p.name: p.default for p in named if p.default is not Parameter.empty},
            sum(p.kind is not Parameter.KEYWORD_ONLY for p in named),
            kinds.count(Parameter.POSITIONAL_ONLY),
            Parameter.VAR_POSITIONAL in kinds,
            Parameter.VAR_KEYWORD in kinds,
        )

    def __call__(self, inputs: Any) -> tuple[Any, ...]:
        """A batch's inputs as values of ``names``, then the rest and the extra ones if there are any: a dict
        by name, and a tuple by place where the forward takes several.
        """
        if isinstance(inputs, dict) and self._takes(inputs):
            given = {name: inputs[name] if name in inputs else self._default(name) for name in self.names}
            extra = {name: value for name, value in inputs.items() if name not in given}
            return self._values(given, (), extra)
        several = isinstance(inputs, (tuple, list)) and (self.placed > 1 or self.rest)
        placed = tuple(inputs) if several else (inputs,)
        if len(placed) > self.placed and not self.rest:
            raise ValueError(f"the model's forward takes {self._listed()}, and the inputs are {len(placed)}")
        given = dict(zip(self.names[: self.placed], placed))
        given |= {name: self._default(name) for name in self.names if name not in given}
        return self._values(given, placed[self.placed :], {})

    def _takes(self, inputs: dict[Any, Any]) -> bool:
        """Whether these are arguments by name, and not one argument that is a dict."""
        known = inputs.keys() & set(self.names)
        others = inputs.keys() - known
        if not others:
            return bool(known)
        needed = set(self.names) - self.defaults.keys()
        if self.extra and needed <= known:
            return True
        if known or not needed:
            raise ValueError(
                f"the model's forward takes {self._listed()}, and the inputs have also"
                f" {', '.join(map(repr, sorted(others, key=str)))}; leave out what it does not take"
            )
        return False

    def _values(self, given: dict[str, Any], rest: tuple[Any, ...], extra: dict[str, Any]) -> tuple[Any, ...]:
        more = [rest] * self.rest + [extra] * self.extra
        return (*(given[name] for name in self.names), *more)

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Those values by name, without those that are None by default too."""
        count = len(self.names)
        named = zip(self.names, values[:count], strict=True)
        found = {n: v for n, v in named if v is not None or self.defaults.get(n) is not None}
        more = zip([_REST] * self.rest + [_EXTRA] * self.extra, values[count:], strict=True)
        return found | {key: value for key, value in more if value}

    def named(self, inputs: Any) -> dict[str, Any]:
        """A batch's inputs by name."""
        return self.by_name(self(inputs))

    def call(self, model: nn.Module, named: dict[str, Any]) -> Any:
        """The model's output for these arguments."""
        named = dict(named)
        rest, extra = named.pop(_REST, ()), named.pop(_EXTRA, {})
        first = self.names[: self.placed if rest else self.only_placed]
        placed = [named.pop(name, self.defaults.get(name)) for name in first]
        return model(*placed, *rest, **named, **extra)

    def _default(self, name: str) -> Any:
        if name not in self.defaults:
            raise ValueError(f"the model's forward needs an argument {name!r} that the inputs do not have")
        return self.defaults[name]

    def _listed(self) -> str:
        return ", ".join(map(repr, self.names)) or "no arguments"
