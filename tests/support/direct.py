"""Pipelines whose messages go from device to device, between ranks that are threads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commsched.backends.races import Races
from commsched.channels import DeviceMessages
from commsched.devices import Device
from commsched.pipeline import ThreadWorld
from commsched.pipeline.messages import ThreadFabric
from scheduler.ir.launches import directions
from scheduler.ir.program import Program


class DirectionOnPaper:
    """NCCL at its worst: the host of each rank waits in every launch until the message has ended on both.

    ``broken``: the reason of a failure that NCCL's watchdog has found out.
    """

    def __init__(self, world: ThreadWorld, source: int, target: int, rank: int, races: Races | None) -> None:
        self._sends, self._races, self.broken, self.ended = rank == source, races, "", ""
        self._peer = target if self._sends else source
        name = f"from {source} to {target}"
        self._bytes, self._answers = (
            world.hub(f"{what} {name}", world.size).channel(rank) for what in ("bytes", "answers")
        )

    def move(self, buffer: torch.Tensor) -> None:
        if self._races is not None:
            self._races.touch("a message", [buffer] * self._sends, [buffer] * (not self._sends))
        message, answer = (self._peer, buffer), (self._peer, torch.zeros(1))
        with _disable_current_modes():
            if self._sends:
                self._bytes.exchange([message], [], "a message")
                self._answers.exchange([], [answer], "the launch of a receive").wait()
            else:
                self._answers.exchange([answer], [], "the launch of a receive")
                self._bytes.exchange([], [message], "a message").wait()

    def failure(self) -> str:
        return self.broken


def messages_on_paper(
    world: ThreadWorld, rank: int, device: Device, program: Program, races: Races | None = None
) -> DeviceMessages:
    made = {pair: DirectionOnPaper(world, *pair, rank, races) for pair in directions(program) if rank in pair}
    going = {pair[1]: each for pair, each in made.items() if pair[0] == rank}
    coming = {pair[0]: each for pair, each in made.items() if pair[1] == rank}

    def end(reason: str) -> None:
        for each in made.values():
            each.ended = reason or "closed"

    return DeviceMessages(device, going, coming, end)


class DirectFabric(ThreadFabric):
    """``made``: the messages of each pipeline that goes from device to device."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.made: list[DeviceMessages] = []

    def direct(self, devices: Collection[torch.device], program: Program) -> DeviceMessages:
        self.made.append(messages_on_paper(self.world, self.rank, Device(torch.device("cpu")), program))
        return self.made[-1]


def directions_of(messages: DeviceMessages) -> list[Any]:
    return list(messages._directions)
