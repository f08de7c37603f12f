"""Rank 0's coordinator thread and every rank's line to it: authenticated, framed messages over TCP.

A connection that breaks is how the death of a rank is noticed at once, whatever that rank was doing; a second
one, without messages, is how a host is noticed that does not answer any more.
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
    """The other end's host does not answer: it may have no part in the end of its process."""


class Line:
    """One end of the two connections between a rank and the coordinator. `keepalive` carries no messages:
    bytes that another process is slow to read would hide whether its host still answers.
    """

    def __init__(self, messages: Connection, keepalive: Connection) -> None:
        self.messages, self.keepalive = close_in_children(messages), close_in_children(keepalive)
        self._host = Host(keepalive, settings().host_timeout)
        self._watched = [messages, keepalive]
        with _as_socket(messages) as handle:
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def dial(cls, address: tuple[str, int], key: bytes, rank: int) -> Line:
        """A rank's end."""
        ends = []
        for keepalive in (False, True):
            connection = Client(address, "AF_INET", authkey=key)
            send(connection, {"rank": rank, "keepalive": keepalive})
            ends.append(connection)
        return cls(*ends)

    def receive(self) -> Any:
        """The next message. ``EOFError`` or ``OSError`` when the other process has ended, ``HostLost``."""
        while True:
            ready = wait(self._watched)
            if self.messages in ready:
                return receive(self.messages)
            self.check_host()
            self._watched.remove(self.keepalive)

    def check_host(self) -> None:
        """When `keepalive` has something to say, which it does once: raises ``HostLost``, or the process has
        ended, which the end of the messages tells in its turn.
        """
        lost = self._host.lost()
        if lost:
            raise HostLost(lost)

    def interrupt(self) -> None:
        """Whoever sends, on another thread, gets an error."""
        with suppress(OSError), _as_socket(self.messages) as handle:
            handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.messages.close()
        self.keepalive.close()


def connect(meeting: Meeting) -> tuple[Line, Coordinator | None]:
    """This rank's line to the coordinator, which is started first where this is rank 0."""
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
        line = Line.dial((host, port), bytes.fromhex(key), meeting.launch.rank)
        if not line.messages.poll(settings().timeout):
            raise CommError(
                f"rank {meeting.launch.rank} reached rank 0 ({host}, port {port}), but not every rank "
                f"connected within {settings().timeout:g} s (COMMSCHED_TIMEOUT)"
            )
        line.receive()
    except CommError:
        raise
    except (OSError, EOFError, RuntimeError) as error:  # the store's own errors are RuntimeError
        raise CommError(
            f"rank {meeting.launch.rank} can not reach rank 0's coordinator on {host}, port {port}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    return line, coordinator


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


def _as_socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class Coordinator(threading.Thread):
    """Reads every rank's messages, lets the negotiator decide, sends its replies. Ends when all ranks have
    left."""

    def __init__(self, listener: socket.socket, token: bytes, size: int, timeout: float) -> None:
        super().__init__(name="commsched-coordinator", daemon=True)
        self._listener, self._token, self._size = close_in_children(listener), token, size
        self._negotiator = Negotiator(size, timeout, time.monotonic)
        self._ranks: dict[Connection, int] = {}  # both connections of every rank
        self._lines: dict[int, Line] = {}

    def run(self) -> None:
        try:
            self._accept_all()
            while self._lines:
                self._serve_once()
        finally:
            # Nobody may be left waiting by a fault in here: whose connection closes ends with an error.
            for line in self._lines.values():
                line.close()
            self._listener.close()

    def _accept_all(self) -> None:
        """Everybody is greeted on a thread of his own: a stranger that says nothing keeps no rank waiting."""
        known: queue.SimpleQueue[tuple[int, bool, Connection]] = queue.SimpleQueue()
        bell, ring = map(close_in_children, Pipe(duplex=False))
        halves: dict[tuple[int, bool], Connection] = {}
        while len(halves) < 2 * self._size:
            for ready in wait([self._listener, bell]):
                if ready is bell:
                    bell.recv_bytes()
                    rank, keepalive, connection = known.get()
                    halves[rank, keepalive], self._ranks[connection] = connection, rank
                    continue
                with suppress(OSError):  # who has gone already
                    guest = close_in_children(Connection(self._listener.accept()[0].detach()))
                    threading.Thread(target=self._greet, args=(guest, known, ring), daemon=True).start()
        self._lines = {rank: Line(halves[rank, False], halves[rank, True]) for rank in range(self._size)}
        self._send([(list(range(self._size)), {"type": "welcome"})])  # some may have died meanwhile

    def _greet(self, guest: Connection, known: queue.SimpleQueue, ring: Connection) -> None:
        try:
            deliver_challenge(guest, self._token)
            answer_challenge(guest, self._token)
            hello = receive(guest)
            known.put((hello["rank"], hello["keepalive"], guest))
            ring.send_bytes(b"!")
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError, KeyError):
            guest.close()  # not one of ours, or one that died: the others' time-out will tell

    def _serve_once(self) -> None:
        deadline = self._negotiator.next_deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        for ready in wait(list(self._ranks), patience):
            rank = self._ranks.get(ready)  # type: ignore[call-overload]
            if rank is not None:  # not dropped by this very turn
                self._hear(rank, ready is self._lines[rank].keepalive)
        self._send(self._negotiator.expire())

    def _hear(self, rank: int, keepalive: bool) -> None:
        line = self._lines[rank]
        try:
            if keepalive:
                del self._ranks[line.keepalive]
                line.check_host()
            else:
                self._handle(rank, receive(line.messages))
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
            if rank == 0:  # and this coordinator with it, at a moment that nobody can foretell
                self._send([(list(self._lines), {"type": "farewell", "message": reason})])

    def _drop(self, rank: int, reason: str, alarm: bool) -> None:
        line = self._lines.pop(rank)
        for connection in (line.messages, line.keepalive):
            self._ranks.pop(connection, None)
        self._send(self._negotiator.leave(rank, reason, alarm))
        line.close()

    def _send(self, replies: list[Reply]) -> None:
        """Rank 0 comes last: once it has heard, its process may end at any moment, this thread with it."""
        letters = [(rank, message) for ranks, message in replies for rank in ranks]
        for rank, message in sorted(letters, key=lambda letter: letter[0] == 0):
            line = self._lines.get(rank)
            try:
                if line is not None:
                    send(line.messages, message)
            except OSError:
                continue  # that rank is gone; its end of the connection says so on the next turn
