"""Channels that exchange buffers between ranks: of processes, of threads, or of one rank alone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol
from zlib import crc32

from torch import Tensor

from comm_core import EngineError, MessageChannel, PendingMessages, Traffic
from commsched.errors import CommError

Parcel = tuple[int, Tensor]  # (peer, contiguous buffer)


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when every buffer has arrived; ``CommError`` after the time-out."""

    def watch(self) -> None:
        """Let another thread move the messages, because this one computes before it calls `wait()`."""
        return None


def total_bytes(parcels: Sequence[Parcel]) -> int:
    return sum(buffer.nbytes for _, buffer in parcels)


class Channel(Protocol):
    """Exchanges buffers with the other ranks; every rank must start the same exchanges in the same order."""

    rank: int
    size: int
    ranks: Sequence[int]  # of the job, in the order of the mesh
    timeout: float
    sent: int  # bytes so far
    own_generator: bool  # False: the ranks are threads, which share torch's default generator

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        """Start sending and receiving; errors name the `operation`."""


class Complete(Pending):
    """Nothing is in flight."""

    def wait(self) -> None:
        return None


class SilentChannel:
    """Moves no bytes: for a mesh of one rank, or a dry run on the meta device."""

    own_generator = True

    def __init__(self, rank: int = 0, size: int = 1, ranks: Sequence[int] = ()) -> None:
        self.rank, self.size, self.timeout, self.sent = rank, size, 0.0, 0
        self.ranks: Sequence[int] = ranks or range(size)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        if any(not buffer.is_meta for _, buffer in recvs):
            raise CommError(
                f"{operation}: a silent channel cannot receive; use it with one rank or on the meta device"
            )
        return Complete()


Message = tuple[int, Sequence[Tensor]]  # (peer, contiguous buffers)


def start(
    messages: MessageChannel,
    sends: Sequence[Message],
    receives: Sequence[Message],
    lane: int,
    operation: str,
    traffic: Traffic | None = None,
) -> Pending:
    """Start messages between processes; see ``MessageChannel.exchange``. Errors are a `CommError`."""
    try:
        return _ProcessMessages(messages.exchange(sends, receives, lane, operation, traffic))
    except EngineError as error:
        raise CommError(str(error)) from error


class _ProcessMessages(Pending):
    def __init__(self, messages: PendingMessages) -> None:
        self._messages = messages

    def wait(self) -> None:
        try:
            self._messages.wait()
        except EngineError as error:
            raise CommError(str(error)) from error

    def watch(self) -> None:
        self._messages.watch()


class ProcessChannel:
    """The ranks of a mesh that are processes, connected by `messages`.

    ``places`` are the places of the mesh's ranks among those that are connected, ``place`` is this rank's,
    ``ranks`` are the mesh's ranks in the job (default: their places). Meshes with the same connections have
    different names.
    """

    own_generator = True

    def __init__(
        self,
        messages: MessageChannel,
        place: int,
        places: Sequence[int],
        name: str,
        ranks: Sequence[int] = (),
    ) -> None:
        self._messages, self._places = messages, list(places)
        self.ranks: Sequence[int] = ranks or self._places
        self.rank, self.size, self.timeout = self._places.index(place), len(self._places), messages.timeout
        self._lane = lane_of(f"{name} {self._places}")
        self.sent = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        for _, buffer in (*sends, *recvs):
            if not buffer.is_cpu:
                raise CommError(
                    f"{operation}: rank {self.rank} has a tile on {buffer.device}, and tiles of several "
                    "processes must be on the CPU; call model.cpu() and image.cpu()"
                )
        self.sent += total_bytes(sends)
        going, coming = (
            [(self._places[peer], [buffer]) for peer, buffer in parcels] for parcels in (sends, recvs)
        )
        return start(self._messages, going, coming, self._lane, operation, Traffic.halo)


def lane_of(name: str) -> int:
    """Return the number of a lane that is not made by all ranks alike, so that they cannot count it."""
    return 1 << 31 | crc32(name.encode())


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
        self.ranks: Sequence[int] = range(hub.size)
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
