"""Rank 0's coordinator thread and every rank's connection to it: authenticated, framed messages over TCP.

A connection that breaks is how the death of a rank is noticed at once, whatever that rank was doing.
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

from commsched.env import settings
from commsched.errors import CommError
from commsched.runtime.negotiator import Message, Negotiator, Reply

if TYPE_CHECKING:
    from commsched.runtime.rendezvous import Meeting

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def connect(meeting: Meeting) -> tuple[Connection, Coordinator | None]:
    """This rank's connection to the coordinator, which is started first where this is rank 0."""
    coordinator = None
    if meeting.launch.rank == 0:
        token = secrets.token_bytes(16)
        listener = socket.create_server((meeting.address, 0), backlog=meeting.launch.size)
        address = listener.getsockname()
        coordinator = Coordinator(listener, token, meeting.launch.size, settings().timeout)
        coordinator.start()
        meeting.store.set("coordinator", json.dumps([*address, token.hex()]))
    host, port = "an address still unknown", 0
    try:
        host, port, key = json.loads(meeting.store.get("coordinator"))
        connection = Client((host, port), "AF_INET", authkey=bytes.fromhex(key))
        _tune(connection)
        send(connection, {"rank": meeting.launch.rank})
        if not connection.poll(settings().timeout):
            raise CommError(
                f"rank {meeting.launch.rank} reached rank 0 ({host}, port {port}), but not every rank "
                f"connected within {settings().timeout:g} s (COMMSCHED_TIMEOUT)"
            )
        receive(connection)
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


def _tune(connection: Connection) -> None:
    """Small messages must leave at once, and a host that vanishes without a word must be noticed."""
    with socket.socket(fileno=_duplicate(connection)) as handle:
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(handle)


def keep_alive(handle: socket.socket) -> None:
    """A host that vanishes without a word breaks the connection."""
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _duplicate(connection: Connection) -> int:
    return os.dup(connection.fileno())


class Coordinator(threading.Thread):
    """Reads every rank's messages, lets the negotiator decide, sends its replies. Ends when all ranks have
    left."""

    def __init__(self, listener: socket.socket, token: bytes, size: int, timeout: float) -> None:
        super().__init__(name="commsched-coordinator", daemon=True)
        self._listener, self._token, self._size = listener, token, size
        self._negotiator = Negotiator(size, timeout, time.monotonic)
        self._ranks: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}

    def run(self) -> None:
        try:
            self._accept_all()
            while self._ranks:
                self._serve_once()
        finally:
            # Nobody may be left waiting by a fault in here: whose connection closes ends with an error.
            for connection in self._connections.values():
                connection.close()
            self._listener.close()

    def _accept_all(self) -> None:
        """Everybody is greeted on a thread of his own: a stranger that says nothing keeps no rank waiting."""
        known: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        bell, ring = Pipe(duplex=False)
        while len(self._connections) < self._size:
            for ready in wait([self._listener, bell]):
                if ready is bell:
                    bell.recv_bytes()
                    rank, connection = known.get()
                    self._ranks[connection], self._connections[rank] = rank, connection
                    continue
                with suppress(OSError):  # who has gone already
                    guest = Connection(self._listener.accept()[0].detach())
                    threading.Thread(target=self._greet, args=(guest, known, ring), daemon=True).start()
        self._send([(list(range(self._size)), {"type": "welcome"})])  # some may have died meanwhile

    def _greet(self, guest: Connection, known: queue.SimpleQueue, ring: Connection) -> None:
        try:
            deliver_challenge(guest, self._token)
            answer_challenge(guest, self._token)
            rank = receive(guest)["rank"]
            _tune(guest)
            known.put((rank, guest))
            ring.send_bytes(b"!")
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError, KeyError):
            guest.close()  # not one of ours, or one that died: the others' time-out will tell

    def _serve_once(self) -> None:
        deadline = self._negotiator.next_deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        for ready in wait(list(self._ranks), patience):
            rank = self._ranks[ready]  # type: ignore[index]
            try:
                message = receive(ready)  # type: ignore[arg-type]
            except (OSError, EOFError):
                self._drop(rank, f"rank {rank} died: its process ended without leaving the job", alarm=True)
                continue
            self._handle(rank, message)
        self._send(self._negotiator.expire())

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
                self._send([(list(self._connections), {"type": "farewell", "message": reason})])

    def _drop(self, rank: int, reason: str, alarm: bool) -> None:
        connection = self._connections.pop(rank)
        del self._ranks[connection]
        self._send(self._negotiator.leave(rank, reason, alarm))
        connection.close()

    def _send(self, replies: list[Reply]) -> None:
        """Rank 0 comes last: once it has heard, its process may end at any moment, this thread with it."""
        letters = [(rank, message) for ranks, message in replies for rank in ranks]
        for rank, message in sorted(letters, key=lambda letter: letter[0] == 0):
            connection = self._connections.get(rank)
            try:
                if connection is not None:
                    send(connection, message)
            except OSError:
                continue  # that rank is gone; its end of the connection says so on the next turn
