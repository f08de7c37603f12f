"""Clusters: devices in nested groups, what a message between two of them costs, how much each can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from scheduler.ir.actions import Kind
from scheduler.ir.link import Level, Link, ring


@dataclass(frozen=True)
class Cluster:
    """``levels`` innermost first, as in ``network_link``: the devices of a host, then the hosts, and so on.
    ``memory``: bytes of each device, or None for no limit. ``devices``: the device of each rank (by default
    all, in order).
    """

    levels: tuple[Level, ...]
    memory: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels:
            raise ValueError("a cluster needs at least one level")
        if self.memory is not None and len(self.memory) != self.size:
            raise ValueError(
                f"memory must have one entry for each of {self.size} devices, got {len(self.memory)}"
            )

    @classmethod
    def flat(cls, devices: int, link: Link, memory: int | Sequence[int] | None = None) -> Cluster:
        """Equal devices, each with a wire of its own."""
        limits = None if memory is None else (memory,) * devices if isinstance(memory, int) else tuple(memory)
        return cls((Level(devices, link.alpha, link.beta),), limits)

    @cached_property
    def size(self) -> int:
        return prod(level.ranks for level in self.levels)

    def at(self, devices: Sequence[int]) -> Cluster:
        """The same cluster with ranks on these devices."""
        return replace(self, devices=tuple(devices))

    def level(self, first: int, last: int) -> Level:
        """The innermost level that joins these two devices: all between them are joined by it too."""
        size = 1
        for level in self.levels:
            size *= level.ranks
            if first // size == last // size:
                return level
        raise ValueError(f"devices {first} and {last} are not both in a cluster of {self.size}")

    def message(self, rank: int, peer: int, size: float) -> float:
        """Seconds that a message between two ranks keeps the sender's wire."""
        level = self.level(*sorted((self._device(rank), self._device(peer))))
        return level.alpha + level.beta * size

    def collective(self, kind: Kind, ranks: Sequence[int], size: float) -> float:
        """Seconds of an RS, AG or AR of ``size`` bytes: a ring at the speed of the widest level it spans."""
        devices = [self._device(rank) for rank in ranks]
        return ring([self.level(min(devices), max(devices))], len(ranks)).cost(kind, size)

    def _device(self, rank: int) -> int:
        return rank if self.devices is None else self.devices[rank]
