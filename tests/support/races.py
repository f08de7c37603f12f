"""A device on paper on which one line of the code does nothing, so that a test sees whether it is missed."""

from __future__ import annotations

import sys

import torch

from commsched.backends.races import Races, WatchedDevice


class Forgetful(WatchedDevice):
    """Leaves out what one line of the code does for the order: a wait, or a note for the allocator.

    ``left_out``: the line, or the function in which all lines of the kind are left out. ``places``: all lines
    that do something of this kind.
    """

    def __init__(self, races: Races, left_out: str = "") -> None:
        super().__init__(races)
        self.places: set[str] = set()
        self._left_out = left_out

    def _does(self, what: str) -> bool:
        code, line = sys._getframe(2).f_code, sys._getframe(2).f_lineno
        place = f"{what} in {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}, line {line}"
        self.places.add(place)
        return self._left_out not in (place, place.rpartition(",")[0])

    def wait(self, stream: int, event: int) -> None:
        if self._does("wait"):
            super().wait(stream, event)

    def synchronize(self, event: int) -> None:
        if self._does("synchronize"):
            super().synchronize(event)

    def uses(self, tensor: torch.Tensor, stream: int) -> None:
        if self._does("uses"):
            super().uses(tensor, stream)
