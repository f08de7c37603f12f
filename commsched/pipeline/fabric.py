"""Carriers of a pipeline's traffic: ordered messages between two ranks, and transports for engines.

Between processes, short messages go over sockets and long ones over gloo, as in spatial parallelism; between
threads, all go through queues.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import comm_core
from commsched.collectives.current_carrier import carrier, epoch
from commsched.collectives.private_groups import connected, data_group
from commsched.env import settings
from commsched.transport.channel import Channel, DistChannel, Pending, SilentChannel, ThreadHub
from commsched.transport.short_messages import MOST_BYTES, ShortMessages

_CHANNEL = 77  # of data_group: all pipelines share its connections
_LANES, _MOST_LANES = 16, 1 << 15  # of one pipeline, and before their numbers come round again
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


class Lane(Protocol):
    """Messages between ranks; those from one rank to another arrive in the order in which they are sent."""

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending: ...

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending: ...


class Fabric(Protocol):
    """The ranks that a pipeline runs on, and their connections."""

    rank: int
    size: int
    timeout: float

    def lane(self, name: str, traffic: comm_core.Traffic | None = None, *, short: bool = True) -> Lane:
        """Messages that no other lane's can be taken for; every rank makes the same lanes in the same order.
        ``traffic``: what is less urgent lets them go first. ``short=False``: short ones go as long ones do.
        """

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        """For an engine over these ranks, each of which must call."""

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        """For what the tiles of a stage exchange; each of these ranks must call."""

    def abort(self) -> None:
        """This rank gives up: the others need not wait for it."""


def flat(buffers: Sequence[Tensor]) -> list[Tensor]:
    """The buffers that are not empty, as vectors."""
    return [buffer.view(-1) for buffer in buffers if buffer.numel()]


class DistLane:
    """Over sockets, and for long messages over the gloo group of all ranks, a channel for each pair and
    direction. Both ends know a message's size, and so which way it comes.
    """

    def __init__(
        self,
        group: Any,
        short: ShortMessages | None,
        name: str,
        timeout: float,
        number: int,
        traffic: comm_core.Traffic | None,
    ) -> None:
        self.group, self.short, self.name, self.timeout, self.number = group, short, name, timeout, number
        self.rank, self.traffic = group.rank(), traffic
        self._pairs: dict[tuple[int, int], DistChannel] = {}

    def _pair(self, sender: int, receiver: int) -> DistChannel:
        pair = sender, receiver
        if pair not in self._pairs:
            # A receive that waits for its sender does not use the link.
            traffic = self.traffic if sender == self.rank else None
            self._pairs[pair] = DistChannel(self.group, pair, self.timeout, traffic, self.number)
        return self._pairs[pair]

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        if self.short is not None and _is_short(buffers):
            # It needs no turn on the link: it is in the socket before anybody could go first.
            return self.short.send(peer, self.number, flat(buffers), self.name)
        parcels = [(1, buffer) for buffer in flat(buffers)]
        pending = self._pair(self.rank, peer).exchange(parcels, [], self.name)
        if self.traffic is not None:
            # Its turn on the link ends when it has left, long before anybody waits for it here.
            pending.watch()
        return pending

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        if self.short is not None and _is_short(buffers):
            return self.short.receive(peer, self.number, flat(buffers), self.name)
        parcels = [(0, buffer) for buffer in flat(buffers)]
        return self._pair(peer, self.rank).exchange([], parcels, self.name)


def _is_short(buffers: Sequence[Tensor]) -> bool:
    return sum(buffer.nbytes for buffer in buffers) <= MOST_BYTES


class DistFabric:
    """The ranks of ``commsched.init()``. ``timeout``: seconds that a message may take (COMMSCHED_TIMEOUT)."""

    def __init__(self, timeout: float | None = None) -> None:
        launch = carrier().launch
        self.rank, self.size = launch.rank, launch.size
        self.timeout = settings().timeout if timeout is None else timeout
        self._number = next(_numbers[epoch()])
        self._name = f"pipeline {self._number}"
        self._lanes = itertools.count()
        self._group, self._short = None, None
        if self.size > 1:
            self._group = data_group(channel=_CHANNEL)
            name, everyone = f"{self._name}/short", range(self.size)
            connections = connected(comm_core.tcp_connections, name, everyone, self.timeout)
            self._short = ShortMessages(self.rank, connections, self.timeout)

    def lane(self, name: str, traffic: comm_core.Traffic | None = None, *, short: bool = True) -> Lane:
        if self._group is None or self._short is None:
            return NoLane()
        number = (_LANES * self._number + next(self._lanes)) % _MOST_LANES
        way = self._short if short else None
        return DistLane(self._group, way, f"{self._name}: {name}", self.timeout, number, traffic)

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        channel = connected(comm_core.tcp_channel, f"{self._name}/{name}", ranks, self.timeout)
        transport = comm_core.DirectTransport(channel, list(ranks).index(self.rank), len(ranks))
        transport.set_timeout(self.timeout)
        return transport

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        if self._group is None:
            return SilentChannel()
        return DistChannel(self._group, ranks, self.timeout)

    def abort(self) -> None:
        if self._short is not None:
            self._short.abort()


class NoLane:
    """One rank alone."""

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        raise ValueError(f"there is no rank {peer}: this job has one rank")

    receive = send


class ThreadWorld:
    """Ranks that are threads of one process, for tests and for trying things out."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        self._aborted = False
        self._hubs: dict[str, ThreadHub] = {}
        self._transports: dict[tuple[str, tuple[int, ...]], list[comm_core.Transport]] = {}

    def fabric(self, rank: int) -> ThreadFabric:
        return ThreadFabric(self, rank)

    def hub(self, name: str, size: int) -> ThreadHub:
        with self._lock:
            hub = self._hubs.setdefault(name, ThreadHub(size, self.timeout))
            self._break()
            return hub

    def transports(self, name: str, ranks: tuple[int, ...]) -> list[comm_core.Transport]:
        with self._lock:
            if (name, ranks) not in self._transports:
                self._transports[name, ranks] = [
                    comm_core.DirectTransport(channel, place, len(ranks))
                    for place, channel in enumerate(comm_core.local_channels(len(ranks)))
                ]
            self._break()
            return self._transports[name, ranks]

    def abort(self) -> None:
        """Whoever waits for a message, now or later, gets an error."""
        with self._lock:
            self._aborted = True
            self._break()

    def _break(self) -> None:
        """Under the lock: what is asked for after the end is born broken, or its rank would wait in vain."""
        if self._aborted:
            for hub in self._hubs.values():
                hub.broken.set()
            for transports in self._transports.values():
                for transport in transports:
                    transport.abort("another rank has ended")


class ThreadLane:
    def __init__(self, hub: ThreadHub, name: str, rank: int) -> None:
        self.channel, self.name = hub.channel(rank), name

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self.channel.exchange([(peer, buffer) for buffer in flat(buffers)], [], self.name)

    def receive(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        return self.channel.exchange([], [(peer, buffer) for buffer in flat(buffers)], self.name)


class ThreadFabric:
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.size, self.timeout = world, rank, world.size, world.timeout
        self._made = 0

    def lane(self, name: str, traffic: comm_core.Traffic | None = None, *, short: bool = True) -> Lane:
        self._made += 1
        return ThreadLane(self.world.hub(f"{self._made} {name}", self.size), name, self.rank)

    def transport(self, name: str, ranks: Sequence[int]) -> Any:
        # A number per rank would differ between ranks: only lanes are made by all of them alike.
        transport = self.world.transports(f"{self._made} {name}", tuple(ranks))[list(ranks).index(self.rank)]
        transport.set_timeout(self.timeout)
        return transport

    def channel(self, name: str, ranks: Sequence[int]) -> Channel:
        hub = self.world.hub(f"{self._made} {name} {list(ranks)}", len(ranks))
        return hub.channel(list(ranks).index(self.rank))

    def abort(self) -> None:
        self.world.abort()


def to_host(tensor: Tensor) -> Tensor:
    """Contiguous and in host memory, where messages travel from."""
    return tensor.detach().to("cpu").contiguous()


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if device.type == "cpu" else tensor.to(device)
