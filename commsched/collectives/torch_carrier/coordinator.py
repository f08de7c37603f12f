"""Rank 0's coordinator thread and every rank's connections to it: authenticated JSON messages over TCP.

Each rank has two connections. The one for messages breaks at once when the rank dies, whatever it was doing.
The other one carries no messages and shows by keepalives that the rank's host still answers.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import TYPE_CHECKING, Any

from comm_core import Host, close_in_children
from commsched.collectives.torch_carrier.negotiation import Message, Negotiator, Reply
from commsched.env import settings
from commsched.errors import CommError

if TYPE_CHECKING:
    from commsched.process.rendezvous import Meeting


class HostLost(OSError):
    """The other end's host does not answer; its process may still run."""


class RankConnection:
    """One end of the two connections between a rank and the coordinator.

    `keepalive` carries no messages: unread bytes would hide whether the other host still answers.
    """

    def __init__(self, messages: Connection, keepalive: Connection) -> None:
        self.messages, self.keepalive = close_in_children(messages), close_in_children(keepalive)
        self._host = Host(keepalive, settings().host_timeout)
        self._watched = [messages, keepalive]
        with _as_socket(messages) as handle:
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def open(cls, address: tuple[str, int], key: bytes, rank: int) -> RankConnection:
        """Connect a rank to the coordinator at `address`."""
        ends = []
        for keepalive in (False, True):
            connection = Client(address, "AF_INET", authkey=key)
            send(connection, {"rank": rank, "keepalive": keepalive})
            ends.append(connection)
        return cls(*ends)

    def receive(self) -> Any:
        """Wait for the next message; ``EOFError`` or ``OSError`` if the other process has ended."""
        while True:
            ready = wait(self._watched)
            if self.messages in ready:
                return receive(self.messages)
            self.check_host()
            self._watched.remove(self.keepalive)

    def check_host(self) -> None:
        """Raise ``HostLost`` if the host does not answer. Call once, when `keepalive` is readable.

        Returns if the other process has ended instead: then `messages` ends, too.
        """
        lost = self._host.lost()
        if lost:
            raise HostLost(lost)

    def interrupt(self) -> None:
        """Make a send that another thread is blocked in raise an error."""
        with suppress(OSError), _as_socket(self.messages) as handle:
            handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.messages.close()
        self.keepalive.close()


def connect(meeting: Meeting) -> tuple[RankConnection, Coordinator | None]:
    """Connect this rank to the coordinator; rank 0 starts the coordinator first and gets it, too."""
    coordinator = None
    if meeting.launch.rank == 0:
        token = secrets.token_bytes(16)
        listener = socket.create_server((meeting.address, 0), backlog=2 * meeting.launch.size)
        address = listener.getsockname()
        coordinator = Coordinator(listener, token, meeting.launch.size, settings().timeout)
        coordinator.start()
        meeting.store.set("coordinator", json.dumps([*address, token.hex()]))
    host, port = "an address still unknown", 0
    try:
        host, port, key = json.loads(meeting.store.get("coordinator"))
        connection = RankConnection.open((host, port), bytes.fromhex(key), meeting.launch.rank)
        if not connection.messages.poll(settings().timeout):
            raise CommError(
                f"rank {meeting.launch.rank} reached rank 0 ({host}, port {port}), but not every rank "
                f"connected within {settings().timeout:g} s (COMMSCHED_TIMEOUT)"
            )
        connection.receive()
    except CommError:
        raise
    except (OSError, EOFError, RuntimeError) as error:  # the store's own errors are RuntimeError
        raise CommError(
            f"rank {meeting.launch.rank} can not reach rank 0's coordinator on {host}, port {port}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    return connection, coordinator


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


def _as_socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class Coordinator(threading.Thread):
    """Passes every rank's messages to the negotiator and its replies to the ranks, until all have left."""

    def __init__(self, listener: socket.socket, token: bytes, size: int, timeout: float) -> None:
        super().__init__(name="commsched-coordinator", daemon=True)
        self._listener, self._token, self._size = close_in_children(listener), token, size
        self._negotiator = Negotiator(size, timeout, time.monotonic)
        self._ranks: dict[Connection, int] = {}  # both connections of every rank
        self._connections: dict[int, RankConnection] = {}

    def run(self) -> None:
        try:
            self._accept_all()
            while self._connections:
                self._serve_once()
        finally:
            # After an exception here, too: a rank whose connection closes raises an error instead of waiting.
            for ends in self._connections.values():
                ends.close()
            self._listener.close()

    def _accept_all(self) -> None:
        """Accept all ranks. Each handshake has its own thread: a silent stranger delays no rank."""
        accepted: queue.SimpleQueue[tuple[int, bool, Connection]] = queue.SimpleQueue()
        woken, wake = map(close_in_children, Pipe(duplex=False))  # wait() can not wait for a queue
        halves: dict[tuple[int, bool], Connection] = {}
        while len(halves) < 2 * self._size:
            for ready in wait([self._listener, woken]):
                if ready is woken:
                    woken.recv_bytes()
                    rank, keepalive, connection = accepted.get()
                    halves[rank, keepalive], self._ranks[connection] = connection, rank
                    continue
                with suppress(OSError):  # the other end has closed already
                    guest = close_in_children(Connection(self._listener.accept()[0].detach()))
                    threading.Thread(
                        target=self._shake_hands, args=(guest, accepted, wake), daemon=True
                    ).start()
        for rank in range(self._size):
            self._connections[rank] = RankConnection(halves[rank, False], halves[rank, True])
        self._send([(list(range(self._size)), {"type": "welcome"})])

    def _shake_hands(self, guest: Connection, accepted: queue.SimpleQueue, wake: Connection) -> None:
        try:
            deliver_challenge(guest, self._token)
            answer_challenge(guest, self._token)
            hello = receive(guest)
            accepted.put((hello["rank"], hello["keepalive"], guest))
            wake.send_bytes(b"!")
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError, KeyError):
            guest.close()  # a stranger, or a rank that died: the others' time-out reports it

    def _serve_once(self) -> None:
        deadline = self._negotiator.next_deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        for ready in wait(list(self._ranks), patience):
            rank = self._ranks.get(ready)  # type: ignore[call-overload]
            if rank is not None:  # None: an earlier connection in this loop has dropped the rank
                self._read(rank, ready is self._connections[rank].keepalive)
        self._send(self._negotiator.expire())

    def _read(self, rank: int, keepalive: bool) -> None:
        ends = self._connections[rank]
        try:
            if keepalive:
                del self._ranks[ends.keepalive]
                ends.check_host()
            else:
                self._handle(rank, receive(ends.messages))
        except HostLost as error:
            self._drop(rank, f"rank {rank} is lost: its {error}", alarm=True)
        except (OSError, EOFError):
            self._drop(rank, f"rank {rank} died: its process ended without leaving the job", alarm=True)

    def _handle(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "request":
            self._send(self._negotiator.submit(rank, message))
        elif kind == "join":
            self._send(self._negotiator.join(rank, message["device"]))
        elif kind == "failed":
            self._negotiator.fail(message["message"])
        elif kind == "bye":
            reason = f"rank {rank} has left the job (its script ended or called shutdown())"
            self._drop(rank, reason, alarm=False)
            if rank == 0:  # this coordinator may end with its process at any moment
                self._send([(list(self._connections), {"type": "farewell", "message": reason})])

    def _drop(self, rank: int, reason: str, alarm: bool) -> None:
        ends = self._connections.pop(rank)
        for connection in (ends.messages, ends.keepalive):
            self._ranks.pop(connection, None)
        self._send(self._negotiator.leave(rank, reason, alarm))
        ends.close()

    def _send(self, replies: list[Reply]) -> None:
        """Send to rank 0 last: once it has the message, its process may end, and this thread with it."""
        addressed = [(rank, message) for ranks, message in replies for rank in ranks]
        for rank, message in sorted(addressed, key=lambda pair: pair[0] == 0):
            with suppress(OSError):  # the rank has died; reading from its connection reports it
                if rank in self._connections:
                    send(self._connections[rank].messages, message)
