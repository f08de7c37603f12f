"""Moving tagged buffers between ranks: over torch.distributed, between threads, or not at all."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import Traffic, abort_message, link_gate
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.groups import members

Parcel = tuple[int, Tensor]  # (peer, contiguous buffer)


# How long gradients let a halo go first: after that it waits for its receiver, not for the link.
PATIENCE, _SLOWEST = 0.1, 10e6  # seconds for any size, and bytes per second


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when every buffer has arrived; ``CommError`` after the time-out."""

    def watch(self) -> None:
        """Somebody else computes before it waits: notice the arrival meanwhile."""


def total_bytes(parcels: Sequence[Parcel]) -> int:
    return sum(buffer.numel() * buffer.element_size() for _, buffer in parcels)


class Channel(Protocol):
    """What the fetch needs of a transport. Calls come in the same order on every rank."""

    rank: int
    size: int
    timeout: float
    sent: int  # bytes so far
    own_generator: bool  # each rank has torch's default generator for itself

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
        """Start sending and receiving; ``what`` names the operation in errors."""


class _Done:
    def wait(self) -> None:
        return None

    def watch(self) -> None:
        return None


class SilentChannel:
    """Moves nothing: a mesh of one rank, or a dry run on the meta device."""

    own_generator = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.timeout, self.sent = rank, size, 0.0, 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
        if any(not buffer.is_meta for _, buffer in recvs):
            raise CommError(
                f"{what}: a silent channel cannot receive; use it with one rank or on the meta device"
            )
        return _Done()


class DistChannel:
    """Point-to-point messages of a c10d group (default: the world), tagged by number and name of the
    exchange.

    ``ranks`` are those of the group that take part, in the order of the grid (default: all): several meshes,
    also in different orders, can share one group. With a ``lane`` (a number below 32768) the channel's
    messages meet those of the same lane only, whatever they are called. ``traffic``: what the link's gate
    takes them for; None for messages that nothing has to wait for.
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
        # Meshes in another order of the same ranks use other tags.
        self._order = crc32(str(self.ranks).encode())
        self._count, self.sent = 0, 0
        self._traffic, self._lane = traffic, lane
        self.lost = ""  # why nothing more will arrive
        self._under_way: WeakValueDictionary[int, _DistPending] = WeakValueDictionary()
        failure_monitor.register(self, members(self.group))

    def abort(self, reason: str) -> None:
        self.lost = reason
        for reference in self._under_way.valuerefs():
            pending = reference()
            if pending is not None:
                pending.abort()

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
        # The name is part of the tag: ranks that run different operations time out instead of mixing buffers.
        named = (crc32(what.encode()) ^ self._order) & 0x7FFF if self._lane is None else 0x8000 | self._lane
        tag = named << 12 | self._count & 0xFFF
        self._count += 1
        leaving = total_bytes(sends)
        self.sent += leaving
        turn = None if self._traffic is None else _Turn(self._traffic, leaving + total_bytes(recvs))
        try:
            # Receives first, so that a message finds its buffer waiting.
            works = [(peer, self._post(self.group.recv, peer, b, tag, what)) for peer, b in recvs]
            works += [(peer, self._post(self.group.send, peer, b, tag, what)) for peer, b in sends]
        except CommError:
            if turn is not None:
                turn.end()
            raise
        buffers = [b for _, b in (*sends, *recvs)]
        self._under_way[self._count] = pending = _DistPending(self, works, buffers, turn, what)
        return pending

    def _post(self, move: Any, peer: int, buffer: Tensor, tag: int, what: str) -> Any:
        try:
            return move([_bytes(buffer)], self.ranks[peer], tag)
        except RuntimeError as error:
            raise CommError(
                f"{what}: rank {self.rank} has lost the connection of rank {peer}; look for the first "
                f"error on "
                f"rank {peer} ({error})"
            ) from error


class _Turn:
    """A message's time on the link, during which less urgent ones are not started."""

    def __init__(self, traffic: Traffic, size: int) -> None:
        self._number = link_gate().begin(traffic, size, PATIENCE + size / _SLOWEST)

    def end(self) -> None:
        link_gate().end(self._number)


class _DistPending:
    def __init__(
        self, channel: DistChannel, works: list, buffers: list[Tensor], turn: _Turn | None, what: str
    ) -> None:
        self.works, self.buffers = works, buffers  # buffers must live until their message has left
        self.channel, self.turn, self.what = channel, turn, what
        self.deadline = time.monotonic() + channel.timeout
        self.watched: threading.Event | None = None
        self.error: CommError | None = None

    def abort(self) -> None:
        for _, work in list(self.works):
            abort_message(work)

    def watch(self) -> None:
        self.watched = threading.Event()
        _watcher().put(self)

    def finish(self) -> None:
        """What the watcher does: only one thread may wait for a message."""
        assert self.watched is not None
        try:
            self._arrive()
        except CommError as error:
            self.error = error
        self.watched.set()

    def wait(self) -> None:
        if self.watched is None:
            self._arrive()
        else:
            self.watched.wait()
        if self.error is not None:
            raise self.error

    def _arrive(self) -> None:
        try:
            for peer, work in self.works:
                self._arrive_one(peer, work)
        finally:
            if self.turn is not None:
                self.turn.end()
            self.works, self.buffers = [], []

    def _arrive_one(self, peer: int, work: Any) -> None:
        left = timedelta(seconds=max(0.001, self.deadline - time.monotonic()))
        rank, patience = self.channel.rank, self.channel.timeout
        try:
            arrived = not self.channel.lost and work.wait(left)
        except RuntimeError as error:
            raise CommError(
                f"{self.what}: rank {rank} heard nothing of rank {peer} within {patience:g} s; "
                f"look for the first error on rank {peer} ({error})"
            ) from error
        if not arrived:
            raise CommError(f"{self.what}: rank {rank} waited for rank {peer}, but {self.channel.lost}")


@lru_cache(maxsize=1)
def _watcher() -> queue.SimpleQueue[_DistPending]:
    """What is put in is waited for, one after the other, on a thread of its own."""
    waiting: queue.SimpleQueue[_DistPending] = queue.SimpleQueue()

    def run() -> None:
        while True:
            waiting.get().finish()

    threading.Thread(target=run, name="commsched halos", daemon=True).start()
    return waiting


def _bytes(buffer: Tensor) -> Tensor:
    """The buffer as bytes, so that any dtype travels."""
    return buffer.view(torch.uint8)


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
    """One rank's end of a `ThreadHub`."""

    own_generator = False

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub, self.rank, self.size, self.timeout = hub, rank, hub.size, hub.timeout
        self.sent = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
        self.sent += total_bytes(sends)
        for peer, buffer in sends:
            self.hub.boxes[self.rank, peer].put((what, buffer.detach().clone()))
        return _ThreadPending(self, recvs, what)


class _ThreadPending:
    def __init__(self, channel: ThreadChannel, recvs: Sequence[Parcel], what: str) -> None:
        self.channel, self.recvs, self.what = channel, recvs, what

    def watch(self) -> None:
        return None

    def wait(self) -> None:
        for peer, buffer in self.recvs:
            sent, received = self._receive(peer)
            if sent != self.what or received.shape != buffer.shape or received.dtype != buffer.dtype:
                raise CommError(
                    f"rank {self.channel.rank} expected {self.what} {tuple(buffer.shape)} "
                    f"{buffer.dtype} of rank "
                    f"{peer} and got {sent} {tuple(received.shape)} {received.dtype}: the ranks run "
                    f"different operations"
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
                    raise CommError(
                        f"{self.what}: rank {rank} heard nothing of rank {peer} within {hub.timeout:g} s"
                    ) from None
