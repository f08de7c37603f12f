"""Short messages over sockets, written and read by the thread that computes.

gloo hands a message to a thread of its own and wakes a waiting rank from another: where every processor
computes, both wait longer for their turn than the message takes. A short one fits into the sockets' buffers:
writing it takes microseconds, and nobody is woken but the rank that waits for it.

Each connection carries all lanes of a fabric. One thread per rank receives; what it finds of other lanes it
keeps.
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
"""Longer messages need somebody who moves them while this rank computes."""
_HEADER = struct.Struct("<IQ")  # before every message: lane, bytes
_MOST_PIECES = 1000  # that a system call takes (IOV_MAX is 1024)


class ShortMessages:
    """``connections``: one for each rank, none for this one."""

    def __init__(self, rank: int, connections: Sequence[TcpConnection | None], timeout: float) -> None:
        self.rank = rank
        self._sockets = [one.data for one in connections if one is not None]
        for one in self._sockets:
            one.setblocking(False)
        self._out = [None if one is None else _Outgoing(one, timeout) for one in connections]
        self._in = [None if one is None else _Incoming(one, timeout) for one in connections]

    def send(self, peer: int, lane: int, buffers: Sequence[Tensor], what: str) -> Pending:
        outgoing = self._out[peer]
        assert outgoing is not None
        views = [_view(buffer) for buffer in buffers]
        header = _HEADER.pack(lane, sum(map(len, views)))
        return _Leaving(outgoing, outgoing.put([header, *views]), f"{what}: rank {self.rank}", peer)

    def receive(self, peer: int, lane: int, buffers: Sequence[Tensor], what: str) -> Pending:
        incoming = self._in[peer]
        assert incoming is not None
        views = [_view(buffer) for buffer in buffers]
        coming = _Coming(incoming, lane, views, f"{what}: rank {self.rank}", peer)
        incoming.expect(coming)
        return coming

    def abort(self) -> None:
        """Whoever waits for this rank hears that nothing will come."""
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the other side has gone already


def _view(buffer: Tensor) -> memoryview:
    return buffer.view(torch.uint8).numpy().data


class _Readiness:
    """Waits for a socket to be readable or writable, or for its host to be lost."""

    def __init__(self, socket: socket.socket, event: int, host: Host) -> None:
        self._socket, self._host = socket, host
        self._poll = select.poll()
        self._poll.register(socket, event)
        self._poll.register(host.keepalive, 0)  # failures are always told

    def wait(self, seconds: float) -> None:
        told = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)]
        if not told or self._socket.fileno() in told:
            return
        lost = self._host.lost()
        if lost:
            raise ConnectionError(lost)
        self._poll.unregister(self._host.keepalive)  # its process has ended: the other socket tells


class _Outgoing:
    """One connection's way out. What the socket does not take at once is copied, and follows on a thread."""

    def __init__(self, connection: TcpConnection, timeout: float) -> None:
        self.socket, self.timeout = connection.data, timeout
        self._room = _Readiness(connection.data, select.POLLOUT, connection.host)
        self._changed = threading.Condition()  # protects what follows
        self._left = bytearray()
        self._put = self._gone = 0  # bytes since the beginning
        self._error: OSError | None = None

    def put(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        """Returns how many bytes will have been put in with these."""
        with self._changed:
            self._put += sum(map(len, pieces))
            idle = not self._left
            sent = self._write(pieces) if idle else 0
            self._gone += sent
            if self._gone < self._put and self._error is None:
                self._left += b"".join(pieces)[sent:]
                if idle:
                    threading.Thread(target=self._follow, name="commsched messages", daemon=True).start()
            return self._put

    def _write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        try:
            return self.socket.sendmsg(pieces if len(pieces) < _MOST_PIECES else [b"".join(pieces)])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._error = error
            return 0

    def _follow(self) -> None:
        """Writes what is left, as the other side makes room."""
        while True:
            lost = None
            try:
                self._room.wait(1)
            except ConnectionError as error:
                lost = error
            with self._changed:
                self._error = self._error or lost
                sent = self._write([self._left[:MOST_BYTES]])
                del self._left[:sent]
                self._gone += sent
                if self._error is not None:
                    self._left.clear()
                self._changed.notify_all()
                if not self._left:
                    return

    def wait(self, upto: int) -> OSError | None:
        """Until so many bytes have left; what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone >= upto or self._error is not None, self.timeout)
            if self._gone >= upto:
                return None
            return self._error or TimeoutError(f"nothing could be sent within {self.timeout:g} s")


class _Leaving:
    """A message that is sent: the buffers are free, its bytes may still be on their way out."""

    def __init__(self, outgoing: _Outgoing, upto: int, who: str, peer: int) -> None:
        self.outgoing, self.upto, self.who, self.peer = outgoing, upto, who, peer

    def wait(self) -> None:
        error = self.outgoing.wait(self.upto)
        if error is not None:
            raise _lost(self.who, self.peer, error)

    def watch(self) -> None:
        return None


class _Incoming:
    """One connection's way in. Of a lane, messages are expected, or some are early: never both."""

    def __init__(self, connection: TcpConnection, timeout: float) -> None:
        self.socket, self.timeout = connection.data, timeout
        self._expected: defaultdict[int, deque[_Coming]] = defaultdict(deque)
        self._early: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        self._header = memoryview(bytearray(_HEADER.size))
        self._arrival = _Readiness(connection.data, select.POLLIN, connection.host)

    def expect(self, coming: _Coming) -> None:
        early = self._early[coming.lane]
        if early:
            coming.copy(early.popleft())
        else:
            self._expected[coming.lane].append(coming)

    def deliver(self, wanted: _Coming) -> None:
        """Takes in messages until this one is there."""
        deadline = time.monotonic() + self.timeout
        while not wanted.here:
            self._next(deadline)

    def _next(self, deadline: float) -> None:
        self._fill(self._header, deadline)
        lane, size = _HEADER.unpack(self._header)
        expected = self._expected[lane]
        if expected:
            coming = expected.popleft()
            coming.check(size)
            for view in coming.views:
                self._fill(view, deadline)
            coming.here = True
        else:
            data = bytearray(size)
            self._fill(memoryview(data), deadline)
            self._early[lane].append(data)

    def _fill(self, view: memoryview, deadline: float) -> None:
        got, size = 0, len(view)
        while got < size:
            try:
                more = self.socket.recv_into(view[got:] if got else view)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"nothing came within {self.timeout:g} s") from None
                self._arrival.wait(left)
                continue
            if not more:
                raise ConnectionError("the connection was closed")
            got += more


class _Coming:
    """A message to be received."""

    def __init__(self, incoming: _Incoming, lane: int, views: list[memoryview], who: str, peer: int) -> None:
        self.incoming, self.lane, self.views, self.who, self.peer = incoming, lane, views, who, peer
        self.here = False

    def wait(self) -> None:
        try:
            self.incoming.deliver(self)
        except OSError as error:
            raise _lost(self.who, self.peer, error) from error

    def watch(self) -> None:
        return None

    def check(self, size: int) -> None:
        expected = sum(map(len, self.views))
        if size != expected:
            raise CommError(
                f"{self.who} expected {expected} bytes of rank {self.peer} and got {size}: the ranks run"
                " different programs, or a stage's output changed its shape"
            )

    def copy(self, data: bytearray) -> None:
        self.check(len(data))
        start = 0
        for view in self.views:
            view[:] = memoryview(data)[start : start + len(view)]
            start += len(view)
        self.here = True


def _lost(who: str, peer: int, error: OSError) -> CommError:
    return CommError(f"{who} has lost rank {peer} ({error}); look for the first error on rank {peer}")
