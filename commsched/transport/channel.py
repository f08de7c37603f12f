"""Channels that exchange buffers between ranks: over a c10d group, between threads, or with no other rank."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import Traffic
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.groups import members
from commsched.transport.group_messages import GroupMessages, begin_turn

Parcel = tuple[int, Tensor]  # (peer, contiguous buffer)


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when every buffer has arrived; ``CommError`` after the time-out."""

    def watch(self) -> None:
        """Let another thread notice the arrival, because this one computes before it calls `wait()`."""
        return None


def total_bytes(parcels: Sequence[Parcel]) -> int:
    return sum(buffer.nbytes for _, buffer in parcels)


class Channel(Protocol):
    """Exchanges buffers with the other ranks; every rank must start the same exchanges in the same order."""

    rank: int
    size: int
    timeout: float
    sent: int  # bytes so far
    own_generator: bool  # False: the ranks are threads, which share torch's default generator

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        """Start sending and receiving; errors name the `operation`."""


class _Complete(Pending):
    def wait(self) -> None:
        return None


class SilentChannel:
    """Moves no bytes: for a mesh of one rank, or a dry run on the meta device."""

    own_generator = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.timeout, self.sent = rank, size, 0.0, 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        if any(not buffer.is_meta for _, buffer in recvs):
            raise CommError(
                f"{operation}: a silent channel cannot receive; use it with one rank or on the meta device"
            )
        return _Complete()


class DistChannel:
    """Point-to-point messages of a c10d group (default: the world).

    ``ranks`` are the group's ranks that take part, in the order of the grid (default: all), so that several
    meshes can share one group. The tag of a message contains the number of the exchange and, with a ``lane``
    (a number below 32768), the lane; otherwise the operation's name. ``traffic`` is the kind of the messages
    for the link's gate, None for messages for which no other one has to wait.
    """

    own_generator = True

    def __init__(
        self,
        group: Any = None,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
        traffic: Traffic | None = Traffic.halo,
        lane: int | None = None,
    ) -> None:
        world: Any = dist.group.WORLD
        self.group = world if group is None else group
        self.ranks = list(range(self.group.size()) if ranks is None else ranks)
        self.rank, self.size, self.timeout = self.ranks.index(self.group.rank()), len(self.ranks), timeout
        # Part of the tag, so that meshes with the same ranks in another order use other tags.
        self._ranks_checksum = crc32(str(self.ranks).encode())
        self._count, self.sent = 0, 0
        self._traffic, self._lane = traffic, lane
        self._abort_reason = ""
        self._in_flight: WeakValueDictionary[int, GroupMessages] = WeakValueDictionary()
        failure_monitor.register(self, members(self.group))

    def abort(self, reason: str) -> None:
        self._abort_reason = reason
        for reference in self._in_flight.valuerefs():
            messages = reference()
            if messages is not None:
                messages.abort(reason)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        tag = self._tag(operation)
        self._count += 1
        send_bytes = total_bytes(sends)
        self.sent += send_bytes
        end_turn = begin_turn(self._traffic, send_bytes + total_bytes(recvs))
        try:
            # Receives first, so that arriving messages find their buffers posted.
            works = [(peer, self._post(self.group.recv, peer, b, tag, operation)) for peer, b in recvs]
            works += [(peer, self._post(self.group.send, peer, b, tag, operation)) for peer, b in sends]
        except CommError:
            end_turn()
            raise
        buffers = [buffer for _, buffer in (*sends, *recvs)]
        messages = GroupMessages(works, buffers, end_turn, operation, self.rank, self.timeout)
        self._in_flight[self._count] = messages
        if self._abort_reason:
            messages.abort(self._abort_reason)
        return messages

    def _tag(self, operation: str) -> int:
        # Ranks that run different operations use different tags: they time out instead of mixing up buffers.
        name = (crc32(operation.encode()) ^ self._ranks_checksum) & 0x7FFF
        return (name if self._lane is None else 0x8000 | self._lane) << 12 | self._count & 0xFFF

    def _post(self, send_or_recv: Any, peer: int, buffer: Tensor, tag: int, operation: str) -> Any:
        try:
            return send_or_recv([buffer.view(torch.uint8)], self.ranks[peer], tag)  # gloo lacks some dtypes
        except RuntimeError as error:
            raise CommError(
                f"{operation}: rank {self.rank} has lost the connection of rank {peer}; look for the first"
                f" error on rank {peer} ({error})"
            ) from error


class ThreadHub:
    """Mailboxes for ranks that are threads of one process: fast enough for thousands of random cases."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size, self.timeout = size, timeout
        pairs = [(a, b) for a in range(size) for b in range(size)]
        self.boxes: dict[tuple[int, int], queue.SimpleQueue] = {pair: queue.SimpleQueue() for pair in pairs}
        self.broken = threading.Event()

    def channel(self, rank: int) -> ThreadChannel:
        return ThreadChannel(self, rank)


class ThreadChannel:
    """One rank's channel of a `ThreadHub`."""

    own_generator = False

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub, self.rank, self.size, self.timeout = hub, rank, hub.size, hub.timeout
        self.sent = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        self.sent += total_bytes(sends)
        for peer, buffer in sends:
            self.hub.boxes[self.rank, peer].put((operation, buffer.detach().clone()))
        return _ThreadMessages(self, recvs, operation)


class _ThreadMessages(Pending):
    def __init__(self, channel: ThreadChannel, recvs: Sequence[Parcel], operation: str) -> None:
        self.channel, self.recvs, self.operation = channel, recvs, operation

    def wait(self) -> None:
        for peer, buffer in self.recvs:
            sent, received = self._receive(peer)
            if sent != self.operation or received.shape != buffer.shape or received.dtype != buffer.dtype:
                raise CommError(
                    f"rank {self.channel.rank} expected {self.operation} {tuple(buffer.shape)} {buffer.dtype}"
                    f" of rank {peer} and got {sent} {tuple(received.shape)} {received.dtype}: the ranks run"
                    " different operations"
                )
            buffer.copy_(received)
        self.recvs = ()

    def _receive(self, peer: int) -> tuple[str, Tensor]:
        hub, rank = self.channel.hub, self.channel.rank
        deadline = time.monotonic() + hub.timeout
        while True:
            try:
                return hub.boxes[peer, rank].get(timeout=0.2)
            except queue.Empty:
                if hub.broken.is_set() or time.monotonic() > deadline:
                    until = "before the job ended" if hub.broken.is_set() else f"within {hub.timeout:g} s"
                    raise CommError(
                        f"{self.operation}: rank {rank} heard nothing of rank {peer} {until}"
                    ) from None
