"""Short messages over sockets, written and read by the thread that computes.

gloo hands a message to a thread of its own, which wakes the waiting rank. Where every core computes, both
threads wait longer for a core than the message travels. A short message fits into the sockets' buffers:
writing it takes microseconds, and only the rank that waits for it is woken.

Each connection carries all lanes of a fabric. One thread per rank receives; it keeps messages of lanes for
which no receive was posted yet.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from comm_core import Host, TcpConnection
from commsched.errors import CommError
from commsched.transport.channel import Pending

MOST_BYTES = 64 << 10
"""Longer messages need another thread that moves them while this one computes."""
_HEADER = struct.Struct("<IQ")  # in front of every message: lane, bytes
_MOST_PIECES = 1000  # of one sendmsg() call (IOV_MAX is 1024)


class ShortMessages:
    """This rank's short messages; ``connections`` has one entry for each rank, None for this one."""

    def __init__(self, rank: int, connections: Sequence[TcpConnection | None], timeout: float) -> None:
        self.rank = rank
        self._sockets = [connection.data for connection in connections if connection is not None]
        for connected in self._sockets:
            connected.setblocking(False)
        self._senders = [None if one is None else _Sender(one, timeout) for one in connections]
        self._receivers = [None if one is None else _Receiver(one, timeout) for one in connections]

    def send(self, peer: int, lane: int, buffers: Sequence[Tensor], operation: str) -> Pending:
        sender = self._senders[peer]
        assert sender is not None
        views = [_view(buffer) for buffer in buffers]
        header = _HEADER.pack(lane, sum(map(len, views)))
        return _PendingSend(sender, sender.send([header, *views]), f"{operation}: rank {self.rank}", peer)

    def receive(self, peer: int, lane: int, buffers: Sequence[Tensor], operation: str) -> Pending:
        receiver = self._receivers[peer]
        assert receiver is not None
        views = [_view(buffer) for buffer in buffers]
        pending = _PendingReceive(receiver, lane, views, f"{operation}: rank {self.rank}", peer)
        receiver.post(pending)
        return pending

    def abort(self) -> None:
        """Close the connections for both directions, which ends the waits of the other ranks."""
        for connected in self._sockets:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer has closed it already


def _view(buffer: Tensor) -> memoryview:
    return buffer.view(torch.uint8).numpy().data


class _Readiness:
    """Waits until a socket is readable or writable, or until its host is lost."""

    def __init__(self, socket: socket.socket, event: int, host: Host) -> None:
        self._descriptor, self._host = socket.fileno(), host
        self._poll = select.poll()
        self._poll.register(socket, event)
        self._poll.register(host.keepalive, 0)  # poll() reports errors of the connection in any case

    def wait(self, seconds: float) -> None:
        ready = self._poll.poll(1000 * seconds)
        if len(ready) != 1 or ready[0][0] == self._descriptor:
            return
        lost = self._host.lost()
        if lost:
            raise ConnectionError(lost)
        self._poll.unregister(self._host.keepalive)  # the process has ended: its data socket closes too


class _Sender:
    """Sends over one connection. A thread sends a copy of the bytes that the socket does not take at once."""

    def __init__(self, connection: TcpConnection, timeout: float) -> None:
        self.socket, self.timeout = connection.data, timeout
        self._writable = _Readiness(connection.data, select.POLLOUT, connection.host)
        self._changed = threading.Condition()  # protects the attributes below
        self._backlog = bytearray()
        self._accepted = self._written = 0  # bytes since the beginning
        self._error: OSError | None = None

    def send(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        """Send the pieces; return the number of bytes written once they have all left."""
        with self._changed:
            self._accepted += sum(map(len, pieces))
            idle = not self._backlog
            written = self._write(pieces) if idle else 0
            self._written += written
            if self._written < self._accepted and self._error is None:
                self._backlog += b"".join(pieces)[written:]
                if idle:
                    thread = threading.Thread(
                        target=self._write_backlog, name="commsched messages", daemon=True
                    )
                    thread.start()
            return self._accepted

    def _write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        try:
            return self.socket.sendmsg(pieces if len(pieces) < _MOST_PIECES else [b"".join(pieces)])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._error = error
            return 0

    def _write_backlog(self) -> None:
        """Write the backlog as fast as the peer accepts it; end when it is empty."""
        while True:
            lost = None
            try:
                self._writable.wait(1)
            except ConnectionError as error:
                lost = error
            with self._changed:
                self._error = self._error or lost
                written = self._write([self._backlog[:MOST_BYTES]])
                del self._backlog[:written]
                self._written += written
                if self._error is not None:
                    self._backlog.clear()
                self._changed.notify_all()
                if not self._backlog:
                    return

    def wait(self, written: int) -> OSError | None:
        """Wait until this many bytes are written; return the error where they cannot be."""
        if self._written >= written:  # without the lock: it only grows
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._written >= written or self._error is not None, self.timeout)
            if self._written >= written:
                return None
            return self._error or TimeoutError(f"nothing could be sent within {self.timeout:g} s")


class _PendingSend(Pending):
    """A sent message: its buffers are free, its last bytes may still be in the sender's backlog."""

    def __init__(self, sender: _Sender, written: int, subject: str, peer: int) -> None:
        self.sender, self.written, self.subject, self.peer = sender, written, subject, peer

    def wait(self) -> None:
        error = self.sender.wait(self.written)
        if error is not None:
            raise _lost(self.subject, self.peer, error)


class _Receiver:
    """Receives from one connection. A lane has either posted receives or early messages, never both."""

    def __init__(self, connection: TcpConnection, timeout: float) -> None:
        self.socket, self.timeout = connection.data, timeout
        self._posted: defaultdict[int, deque[_PendingReceive]] = defaultdict(deque)
        self._early: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        self._header = memoryview(bytearray(_HEADER.size))
        self._readable = _Readiness(connection.data, select.POLLIN, connection.host)

    def post(self, receive: _PendingReceive) -> None:
        early = self._early[receive.lane]
        if early:
            receive.copy(early.popleft())
        else:
            self._posted[receive.lane].append(receive)

    def receive_until(self, wanted: _PendingReceive) -> None:
        """Receive messages of all lanes until `wanted` has arrived."""
        deadline = time.monotonic() + self.timeout
        while not wanted.arrived:
            self._receive_next(deadline)

    def _receive_next(self, deadline: float) -> None:
        self._fill(self._header, deadline)
        lane, size = _HEADER.unpack(self._header)
        posted = self._posted[lane]
        if posted:
            receive = posted.popleft()
            receive.check(size)
            for view in receive.views:
                self._fill(view, deadline)
            receive.arrived = True
        else:
            data = bytearray(size)
            self._fill(memoryview(data), deadline)
            self._early[lane].append(data)

    def _fill(self, view: memoryview, deadline: float) -> None:
        filled, size = 0, len(view)
        while filled < size:
            try:
                more = self.socket.recv_into(view[filled:] if filled else view)
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(f"nothing came within {self.timeout:g} s") from None
                self._readable.wait(remaining)
                continue
            if not more:
                raise ConnectionError("the connection was closed")
            filled += more


class _PendingReceive(Pending):
    """A posted receive."""

    def __init__(
        self, receiver: _Receiver, lane: int, views: list[memoryview], subject: str, peer: int
    ) -> None:
        self.receiver, self.lane, self.views, self.subject, self.peer = receiver, lane, views, subject, peer
        self.arrived = False

    def wait(self) -> None:
        try:
            self.receiver.receive_until(self)
        except OSError as error:
            raise _lost(self.subject, self.peer, error) from error

    def check(self, size: int) -> None:
        expected = sum(map(len, self.views))
        if size != expected:
            raise CommError(
                f"{self.subject} expected {expected} bytes of rank {self.peer} and got {size}: the ranks run"
                " different programs, or a stage's output changed its shape"
            )

    def copy(self, data: bytearray) -> None:
        """Fill the views with a message that arrived before this receive was posted."""
        self.check(len(data))
        start = 0
        for view in self.views:
            view[:] = memoryview(data)[start : start + len(view)]
            start += len(view)
        self.arrived = True


def _lost(subject: str, peer: int, error: OSError) -> CommError:
    return CommError(f"{subject} has lost rank {peer} ({error}); look for the first error on rank {peer}")
