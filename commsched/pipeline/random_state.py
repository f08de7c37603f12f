"""The position of the random number generators that a stage draws from."""

from __future__ import annotations

import math
import random
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from types import FunctionType
from typing import Any

import numpy as np
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


def python_state() -> Tensor:
    """The state of Python's ``random``, as bytes."""
    _, words, gauss = random.getstate()
    last = struct.pack("d", math.nan if gauss is None else gauss)
    return torch.frombuffer(bytearray(array("I", words).tobytes() + last), dtype=torch.uint8)


def set_python_state(state: Tensor) -> None:
    data = state.numpy().tobytes()
    (gauss,) = struct.unpack("d", data[-8:])
    random.setstate((3, tuple(array("I", data[:-8])), None if math.isnan(gauss) else gauss))


def numpy_state() -> Tensor:
    """The state of ``numpy.random``, as bytes: none if the user has given it another kind of generator."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return torch.empty(0, dtype=torch.uint8)
    last = struct.pack("iid", state["state"]["pos"], state["has_gauss"], state["gauss"])
    return torch.frombuffer(bytearray(state["state"]["key"].tobytes() + last), dtype=torch.uint8)


def set_numpy_state(state: Tensor) -> None:
    if data := state.numpy().tobytes():
        key = np.frombuffer(data[:-16], np.uint32)
        np.random.set_state(("MT19937", key, *struct.unpack("iid", data[-16:])))


Generator = tuple[Tensor, Callable[[Tensor], Any]]


def default_generators(device: torch.device) -> list[Generator]:
    """The state of each generator that a forward may draw from unasked, and the function that sets it."""
    found: list[Generator] = [
        (torch.get_rng_state(), torch.set_rng_state),
        (python_state(), set_python_state),
        (numpy_state(), set_numpy_state),
    ]
    if device.type == "cuda":
        found.append((torch.cuda.get_rng_state(device), partial(torch.cuda.set_rng_state, device=device)))
    return found


def seed_random(seed: int, device: torch.device) -> None:
    """As ``torch.manual_seed``, which also looks for all other devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def drawing_at(device: torch.device, *place: int) -> Iterator[None]:
    """Within ``with``, torch's generators begin with a seed made of their state and the place, and stay where
    they are. So ranks that are seeded alike, to read the same batches, draw other masks, and go on reading
    the same batches with any number of stages.
    """
    before = random_state(device)
    digest = blake2b(before[0].numpy().tobytes() + repr(place).encode(), digest_size=8).digest()
    seed_random(int.from_bytes(digest, "little"), device)
    try:
        yield
    finally:
        set_random_state(before, device)


class SharedRandom:
    """Random numbers that are the same in all stages of one forward, from a seed of their own."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._state: list[Tensor] | None = None

    def draw(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The result of a call that may draw random numbers, and whether it did; the generator of everything
        else stays where it is.
        """
        with ONE_AT_A_TIME:
            before = random_state(self._device)
            try:
                if self._state is None:
                    seed_random(self._seed, self._device)
                    self._state = random_state(self._device)
                else:
                    set_random_state(self._state, self._device)
                result, last = func(*args, **kwargs), self._state
                self._state = random_state(self._device)
            finally:
                set_random_state(before, self._device)
            return result, not all(map(torch.equal, last, self._state))


@lru_cache(1 << 12)
def may_draw(func: Callable[..., Any]) -> bool:
    """Whether a call may draw random numbers: operations have a tag, functions in Python may call any."""
    if isinstance(func, FunctionType):
        return True
    packet: Any = getattr(func, "overloadpacket", func)
    if not hasattr(packet, "overloads"):
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in overloads)
