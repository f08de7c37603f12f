"""Pipelines and tiles on devices on paper: ranks that are threads, each under the race detector.

Messages travel as between GPUs that have no NCCL between them: copied to pinned memory and back by
``commsched.channels.Staging``, while the ranks' operations run on CPU tensors. Or ``direct``, as over NCCL.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commsched.backends.races import Races
from commsched.channels import Channel, DeviceMessages, Parcel, Pending, Staging, ThreadHub
from commsched.pipeline import ThreadWorld
from commsched.pipeline.messages import Lane, ThreadFabric
from scheduler.ir.program import Program
from tests.support.direct import messages_on_paper
from tests.support.one_process import resolve_operations
from tests.support.races import Forgetful
from tests.support.thread_ranks import run_threads

T = TypeVar("T")


class WatchedMessages(Pending):
    """Messages of another channel or lane, whose arrival in pinned memory the detector is told."""

    def __init__(self, pending: Pending, races: Races, received: Sequence[torch.Tensor]) -> None:
        self._pending, self._races, self._received = pending, races, received

    def wait(self) -> None:
        with _disable_current_modes():  # the host moves them
            self._pending.wait()
        self._races.arrives(self._received)
        self._received = ()


class WatchedStaging(Staging):
    """Tells the detector when the host reads what was copied out, and that who waits for sums knows of it."""

    device: Forgetful

    def copy_out(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], then: Callable[[], None]
    ) -> Future[Any]:
        races, after_reading = self.device.races, Future[Any]()

        def read() -> None:
            races.leaves([target for _, target in copies])
            after_reading.set_result(races.record(races.stream))
            then()

        super().copy_out(copies, read)
        return after_reading


class WatchedLane:
    """A lane whose messages are in host memory."""

    def __init__(self, lane: Lane, races: Races) -> None:
        self._lane, self._races = lane, races

    def send(self, peer: int, buffers: Sequence[torch.Tensor]) -> Pending:
        self._races.leaves(buffers)
        with _disable_current_modes():
            return WatchedMessages(self._lane.send(peer, buffers), self._races, ())

    def receive(self, peer: int, buffers: Sequence[torch.Tensor]) -> Pending:
        return WatchedMessages(self._lane.receive(peer, buffers), self._races, buffers)


class WatchedChannel:
    """A channel of tiles on a device."""

    own_generator = False

    def __init__(self, channel: Channel, device: Forgetful) -> None:
        self._channel, self._races, self._staging = channel, device.races, Staging(device)
        self.rank, self.size, self.timeout = channel.rank, channel.size, channel.timeout
        self.ranks = channel.ranks

    @property
    def sent(self) -> int:
        return self._channel.sent

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        if any(buffer.is_meta for _, buffer in (*sends, *recvs)):
            return self._channel.exchange(sends, recvs, operation)
        return self._staging.exchange(sends, recvs, partial(self._start, operation))

    def _start(self, operation: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
        self._races.leaves([buffer for _, buffer in sends])
        with _disable_current_modes():
            pending = self._channel.exchange(sends, recvs, operation)
        return WatchedMessages(pending, self._races, [buffer for _, buffer in recvs])


class WatchedFabric(ThreadFabric):
    def __init__(self, world: ThreadWorld, rank: int, device: Forgetful, direct: bool = False) -> None:
        super().__init__(world, rank)
        self._device, self._direct = device, direct

    def lane(self, name: str, traffic: Any = None) -> Lane:
        return WatchedLane(super().lane(name, traffic), self._device.races)

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        return WatchedChannel(super().channel(name, ranks), self._device)

    def staging(self, device: torch.device) -> Staging:
        return WatchedStaging(self._device)

    def direct(self, devices: Collection[torch.device], program: Program) -> DeviceMessages | None:
        if not self._direct:
            return None
        return messages_on_paper(self.world, self.rank, self._device, program, self._device.races)


def new_devices(size: int, left_out: str = "", at_once: bool = True) -> list[Forgetful]:
    """Return the devices of ranks that are threads. ``left_out``: a line whose wait is left out."""
    resolve_operations()
    return [Forgetful(Races(at_once=at_once), left_out) for _ in range(size)]


def run_pipelines(
    devices: Sequence[Forgetful],
    work: Callable[[WatchedFabric], T],
    timeout: float = 200.0,
    direct: bool = False,
) -> list[T]:
    """Return the results of ``work(fabric)`` on every rank."""
    world = ThreadWorld(len(devices), timeout)

    def run(rank: int) -> T:
        with devices[rank].races:
            return work(WatchedFabric(world, rank, devices[rank], direct))

    with no_collector():
        return run_threads(len(devices), run, timeout + 300.0, world.abort)


def run_tiles(
    devices: Sequence[Forgetful], work: Callable[[WatchedChannel], T], timeout: float = 200.0
) -> list[T]:
    """Return the results of ``work(channel)`` on every rank."""
    hub = ThreadHub(len(devices), timeout)

    def run(rank: int) -> T:
        with devices[rank].races:
            return work(WatchedChannel(hub.channel(rank), devices[rank]))

    with no_collector():
        return run_threads(len(devices), run, timeout + 300.0, hub.broken.set)


def pipelines(
    size: int, work: Callable[[WatchedFabric], T], left_out: str = "", direct: bool = False
) -> tuple[list[T], list[Forgetful]]:
    """Return the results of ``work(fabric)`` on every rank, and the ranks' devices."""
    devices = new_devices(size, left_out)
    return run_pipelines(devices, work, direct=direct), devices


def tiles(
    size: int, work: Callable[[WatchedChannel], T], left_out: str = ""
) -> tuple[list[T], list[Forgetful]]:
    """The same for ``work(channel)``."""
    devices = new_devices(size, left_out)
    return run_tiles(devices, work), devices


def races_of(devices: Sequence[Forgetful]) -> list[str]:
    return [f"rank {rank}: {race}" for rank, device in enumerate(devices) for race in device.races.found()]


@contextmanager
def no_collector() -> Iterator[None]:
    """Let the last reference free memory: when the collector comes depends on what ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
