"""Channels that exchange buffers between ranks: of processes, of threads, or of one rank alone.

They read host memory; `Staging` copies between that and a device. `DeviceMessages` go from device to device.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from comm_core import EngineError, MessageChannel, PendingMessages, Traffic
from commsched.devices import Device, Event, device_of
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


class Staging:
    """Copies between a device and host memory, where messages travel, beside the device's computation.

    [Note: who waits for whom]
    The thread that computes waits for no copy. Another thread, the sender, waits for the mark that ends a
    copy out and then starts the message, so messages leave in the order in which they are handed over. It
    does not wait for what the other ranks do, and so ends as soon as this rank's device gets there::

        current stream   F0 * (o0 waits)      F1 (waits for i1) ...
        out stream            o0 *
        sender                    sees *, starts the message
        in stream                                 i1 *       once the host has the other rank's message

    Memory: what is copied out must live until the out stream is done (``Device.uses``), and so must what was
    copied in until the current stream is. Pinned memory is held until its message has left; torch's allocator
    lets copies end before it gives that memory on.
    """

    def __init__(self, device: Device) -> None:
        self.device, self._into = device, device.stream()
        self._sender = ThreadPoolExecutor(1, "commsched-sender")

    def send(self, buffers: Sequence[Tensor], start: Callable[[list[Tensor]], Pending]) -> Pending:
        """Call ``start`` with copies of the buffers in host memory. Those that are there already stay."""
        outgoing, end = self._copied_out(buffers)
        return _Handed(self._sender.submit(self._hand_over, end, start, outgoing))

    def copy_out(self, copies: Sequence[tuple[Tensor, Tensor]], then: Callable[[], None]) -> Future[Event]:
        """Copy each first tensor to the second one in pinned memory, and call ``then`` when that is done.

        Returns, once it has been called, the mark that ends the copies. The caller keeps the first ones until
        it has waited for that.
        """
        device = self.device
        device.wait(device.comm, device.record(device.current()))
        with device.on(device.comm), torch.no_grad():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        end = device.record(device.comm)

        def hand_over() -> Event:
            device.synchronize(end)
            then()
            return end

        return self._sender.submit(hand_over)

    def host_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.device.host_empty((length,), dtype).zero_()

    def bring(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the device of what has arrived; the current stream waits for them."""
        device, current = self.device, self.device.current()
        with device.on(self._into):
            here = [torch.empty(each.shape, dtype=each.dtype, device=device.device) for each in buffers]
            for tensor, buffer in zip(here, buffers, strict=True):
                tensor.copy_(buffer, non_blocking=True)
        device.wait(current, device.record(self._into))
        for tensor in here:
            device.uses(tensor, current)
        return here

    def exchange(
        self,
        sends: Sequence[Parcel],
        recvs: Sequence[Parcel],
        start: Callable[[list[Parcel], list[Parcel]], Pending],
    ) -> Pending:
        """Call ``start`` with parcels in host memory; what arrives is copied to where ``recvs`` says."""
        device = self.device
        # Memory that the current stream has used until now becomes a buffer of ``recvs``.
        device.wait(self._into, device.record(device.current()))
        outgoing, end = self._copied_out([buffer for _, buffer in sends])
        coming = [(peer, self._landing(buffer)) for peer, buffer in recvs]

        def post(hosts: list[Tensor]) -> Pending:
            pending = start([(peer, host) for (peer, _), host in zip(sends, hosts, strict=True)], coming)
            pending.watch()
            return pending

        pending = _Handed(self._sender.submit(self._hand_over, end, post, outgoing))
        return _Arriving(pending, self, coming, recvs)

    def take_in(self, coming: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        """Copy parcels that have arrived; the current stream waits for that."""
        with self.device.on(self._into), torch.no_grad():
            for (_, buffer), (_, host) in zip(recvs, coming, strict=True):
                if buffer is not host:
                    buffer.copy_(host, non_blocking=True)
        self.device.wait(self.device.current(), self.device.record(self._into))

    def _copied_out(self, buffers: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        device = self.device
        device.wait(device.comm, device.record(device.current()))
        with device.on(device.comm), torch.no_grad():
            hosts = [self._copy_out(buffer) for buffer in buffers]
        return hosts, device.record(device.comm)

    def _copy_out(self, buffer: Tensor) -> Tensor:
        if buffer.device != self.device.device:
            return buffer.contiguous().resolve_conj().resolve_neg()
        self.device.uses(buffer, self.device.comm)
        host = self.device.host_empty(buffer.shape, buffer.dtype)
        return host.copy_(buffer.resolve_conj().resolve_neg(), non_blocking=True)

    def _landing(self, buffer: Tensor) -> Tensor:
        on_host = buffer.device != self.device.device
        return buffer if on_host else self.device.host_empty(buffer.shape, buffer.dtype)

    def _hand_over(
        self, end: Event, start: Callable[[list[Tensor]], Pending], hosts: list[Tensor]
    ) -> Pending:
        self.device.synchronize(end)
        return start(hosts)


def staging_of(device: Device) -> Staging | None:
    """Return how messages of a device's memory travel; None where the host reads it."""
    return Staging(device) if device.asynchronous else None


class _Handed(Pending):
    """A message that the sender starts."""

    def __init__(self, started: Future[Pending]) -> None:
        self._started = started

    def wait(self) -> None:
        self._started.result().wait()


class _Arriving(Pending):
    """An exchange of tiles, which arrives on the device with the end of the wait."""

    def __init__(
        self, pending: Pending, staging: Staging, coming: Sequence[Parcel], recvs: Sequence[Parcel]
    ) -> None:
        self._pending, self._staging, self._coming, self._recvs = pending, staging, coming, recvs

    def wait(self) -> None:
        self._pending.wait()
        self._staging.take_in(self._coming, self._recvs)
        self._coming = self._recvs = ()


class Direction(Protocol):
    """Messages from one rank to another, in the order in which both launch them; NCCL's, or a test's."""

    def move(self, buffer: Tensor) -> None:
        """Send or receive these bytes on the current stream."""

    def failure(self) -> str:
        """Return why bytes may not have arrived, "" if they have."""


class DeviceMessages:
    """Messages between the memory of this rank's device and others', which the host does not wait for.

    ``going`` and ``coming``: to and from each peer. ``end`` closes the connections or, with a reason, aborts
    them; it is called once.

    [Note: streams of messages]
    Each direction has a stream of its own on both ranks, so a message waits for nothing but the earlier ones
    of its direction and, where it is sent, for the computation before it::

        current stream   F0 * (o0 waits)      F1 (waits for i1) ...
        stream to 1           o0 . . . . . . .       until rank 1 has launched its receive
        stream from 0    i1 . . . . . . . . *        until rank 0 has sent

    Memory: what is received is allocated on its stream, so that a receive waits for no computation here. What
    is sent must live until the stream to the peer is done (``Device.uses``), and what is received until the
    current stream is. The order in which ranks launch messages is that of ``scheduler.ir.launches``.
    """

    def __init__(
        self,
        device: Device,
        going: Mapping[int, Direction],
        coming: Mapping[int, Direction],
        end: Callable[[str], None],
    ) -> None:
        self.device, self._end, self._failure = device, end, ""
        self._going, self._coming = (
            {peer: (direction, device.stream()) for peer, direction in each.items()}
            for each in (going, coming)
        )
        self._directions = [*going.values(), *coming.values()]

    def send(self, peer: int, buffers: Sequence[Tensor]) -> Pending:
        self._check()
        device, (direction, stream) = self.device, self._going[peer]
        ready = [buffer.contiguous().resolve_conj().resolve_neg() for buffer in buffers if buffer.numel()]
        device.wait(stream, device.record(device.current()))
        with device.on(stream), torch.no_grad():
            for buffer in ready:
                direction.move(_bytes(buffer))
                device.uses(buffer, stream)
        return Complete()

    def receive(
        self, peer: int, buffers: Callable[[Callable[..., Tensor]], list[Tensor]]
    ) -> tuple[list[Tensor], Pending]:
        """Launch a receive into what ``buffers(empty)`` returns. ``wait()`` lets the current stream wait."""
        self._check()
        device, (direction, stream) = self.device, self._coming[peer]
        with device.on(stream), torch.no_grad():
            made = buffers(partial(torch.empty, device=device.device))
            for buffer in made:
                if buffer.numel():
                    direction.move(_bytes(buffer))
        return made, _OnStream(device, device.record(stream), made)

    def confirm(self) -> None:
        """Let the host wait for what is on the current stream; ``CommError`` where messages did not arrive.

        NCCL ends a lost message without its bytes. So nobody may read a loss, or step with gradients, that
        come from messages which were not confirmed.
        """
        self.device.synchronize(self.device.record(self.device.current()))
        self._check()

    def _check(self) -> None:
        found = self._failure or next(filter(None, (each.failure() for each in self._directions)), "")
        if found:
            raise CommError(found)

    def abort(self, reason: str) -> None:
        """End messages in flight, and every later one. May be called from any thread."""
        if not self._failure:
            self._failure = reason  # before hosts that wait go on
            self._end(reason)

    def close(self) -> None:
        """Close the connections. No message may be in flight."""
        if not self._failure:
            self._failure = "the pipeline is closed"
            self._end("")


def _bytes(buffer: Tensor) -> Tensor:
    """The buffer as bytes: NCCL does not know all types."""
    return buffer.view(-1).view(torch.uint8)


class _OnStream(Pending):
    """Buffers that are complete at a mark of another stream."""

    def __init__(self, device: Device, end: Event, buffers: Sequence[Tensor]) -> None:
        self._device, self._end, self._buffers = device, end, buffers

    def wait(self) -> None:
        current = self._device.current()
        self._device.wait(current, self._end)
        for buffer in self._buffers:
            self._device.uses(buffer, current)
        self._buffers = ()


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
        self._staging: Staging | None = None  # of a GPU
        self.sent = 0

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], operation: str) -> Pending:
        self.sent += total_bytes(sends)
        start = partial(self._start, operation)
        device = next((buffer.device for _, buffer in (*sends, *recvs) if not buffer.is_cpu), None)
        if device is not None and device.type != "cuda":
            raise CommError(f"{operation}: rank {self.rank} has a tile on {device}, where there is no data")
        if device is not None and self._staging is None:
            self._staging = Staging(device_of(device))
        if self._staging is None:
            return start(sends, recvs)
        # Parcels in host memory, too: they must not overtake others of this channel.
        return self._staging.exchange(sends, recvs, start)

    def _start(self, operation: str, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Pending:
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
