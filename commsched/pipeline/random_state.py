"""The position of the random number generators that a stage draws from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ONE_AT_A_TIME = threading.RLock()
"""Held by whoever sets torch's generator back: it is one for all threads, and ranks may be threads."""


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the host's random generator, and of the device's if it is a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


class SharedRandom:
    """Random numbers that are the same in all stages of one forward, from a seed of their own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._state: list[Tensor] | None = None

    def draw(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that draws random numbers; the generator of everything else stays where it is."""
        with ONE_AT_A_TIME:
            before = random_state(self._device)
            if self._state is None:
                torch.manual_seed(self._seed)
            else:
                set_random_state(self._state, self._device)
            result = func(*args, **kwargs)
            self._state = random_state(self._device)
            set_random_state(before, self._device)
            return result
