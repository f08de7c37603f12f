"""The position of the random number generators that a stage draws from."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> list[Tensor]:
    """The states of the host's random generator, and of the device's if it is a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
