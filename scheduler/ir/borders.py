"""Borders: what a tile of an image exchanges with its neighbours, by layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Border:
    """Bytes that a tile exchanges before a layer's forward and after its backward, and the ``share`` of the
    layer's work (0 to 1) that needs or makes them.
    """

    forward: float
    backward: float
    share: float

    def __post_init__(self) -> None:
        if not (self.forward >= 0 and self.backward >= 0 and 0 <= self.share <= 1):
            raise ValueError(f"a border has bytes of at least 0 and a share from 0 to 1, got {self}")
