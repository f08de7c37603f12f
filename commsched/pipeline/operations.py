"""What one forward of a model did: by this record the stages of a pipeline know what crosses a border."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, list[tuple[int, int]]]
""""call" and "return" of a layer; "read" of one operation: layers, and the tensor of each (its id)."""


@dataclass
class Operations:
    """By number the layer that makes a result, the last layer that reads it, how many results there were at
    that moment, and whether it is written to; by input the last layer that reads its values. ``decisions``:
    the values of inputs that the code asked for, such as ``mask.all()``: with others it may do other
    operations.
    """

    maker: list[int] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    last_moment: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, float] = field(default_factory=dict)
    decisions: list[Any] = field(default_factory=list)
    writes_inputs: bool = False
    draws: bool = False  # whether operations that every stage computes draw random numbers
    events: list[Event] = field(default_factory=list)
    inside: int = 0  # how many calls of layers are under way
    outer_uses: list[tuple[int, int]] = field(default_factory=list)  # reads outside of them: number, layer
    calls: dict[int, list[Any]] = field(default_factory=dict)  # of layers; see layer_calls.py

    def use(self, number: int, layer: int) -> None:
        self.last_use[number] = max(layer, self.last_use.get(number, 0))
        self.last_moment[number] = len(self.maker)
        if not self.inside:
            self.outer_uses.append((number, layer))

    def crossing(self, cut: int) -> tuple[int, ...]:
        """The numbers of the results that cross a border: made before layer ``cut``, read in it or later."""
        return tuple(n for n, maker in enumerate(self.maker) if maker < cut <= self.last_use.get(n, -1))

    def before(self, layer: int) -> int:
        """How many results the layers before ``layer`` make."""
        return next((n for n, maker in enumerate(self.maker) if maker >= layer), len(self.maker))
