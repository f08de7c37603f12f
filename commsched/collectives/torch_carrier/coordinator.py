"""Rank 0's coordinator thread and every rank's connections to it: JSON messages over TCP.

Each rank has two connections. The one for messages breaks at once when the rank dies, whatever it was doing.
The other one carries no messages and shows by keepalives that the rank's host still answers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from comm_core import Host, TcpConnection, close_in_children, tcp_connections
from commsched.collectives.torch_carrier.negotiation import Message, Negotiator, Reply
from commsched.env import settings
from commsched.errors import CommError

if TYPE_CHECKING:
    from commsched.process.rendezvous import Meeting


class HostLost(OSError):
    """The other end's host does not answer; its process may still run."""


class RankConnection:
    """One end of the two connections between a rank and the coordinator.

    The keepalive connection carries no messages: unread bytes would hide whether the other host still
    answers. Rank 0 needs none to its own coordinator.
    """

    def __init__(self, messages: Connection, host: Host | None = None) -> None:
        self.messages, self._host = close_in_children(messages), host
        self.keepalive: socket.socket | None = host.keepalive if host else None
        self._watched = [end for end in (self.messages, self.keepalive) if end is not None]

    @classmethod
    def over(cls, connection: TcpConnection) -> RankConnection:
        return cls(Connection(connection.data.detach()), connection.host)

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
        lost = self._host.lost() if self._host is not None else ""
        if lost:
            raise HostLost(lost)

    def interrupt(self) -> None:
        """Make a send that another thread is blocked in raise an error."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.messages.fileno())) as handle:
            handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.messages.close()
        if self.keepalive is not None:
            self.keepalive.close()


def connect(meeting: Meeting) -> tuple[RankConnection, Coordinator | None]:
    """Connect this rank to the coordinator; rank 0 starts the coordinator and gets it, too."""
    rank, size, patience = meeting.launch.rank, meeting.launch.size, settings().start_timeout
    store = PrefixStore("coordinator", meeting.store)
    try:
        connections = tcp_connections(
            store, rank, size, meeting.address, patience, settings().host_timeout, star=True
        )
    except RuntimeError as error:  # also the store's own errors
        raise CommError(
            f"rank {rank} can not connect to rank 0's coordinator from {meeting.address}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    others = [RankConnection.over(one) for one in connections if one is not None]
    if rank != 0:
        return others[0], None
    mine, own = Pipe()
    coordinator = Coordinator([RankConnection(own), *others], settings().timeout, settings().warning)
    coordinator.start()
    return RankConnection(mine), coordinator


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


class Coordinator(threading.Thread):
    """Passes every rank's messages to the negotiator and its replies to the ranks, until all have left."""

    def __init__(
        self, connections: Sequence[RankConnection], timeout: float, warning: float = math.inf
    ) -> None:
        super().__init__(name="commsched-coordinator", daemon=True)
        self._size = len(connections)
        self._negotiator = Negotiator(self._size, timeout, time.monotonic, warning)
        self._connections = dict(enumerate(connections))
        self._ranks: dict[Any, int] = {}  # of both connections
        for rank, ends in self._connections.items():
            self._ranks.update({end: rank for end in (ends.messages, ends.keepalive) if end is not None})

    def run(self) -> None:
        try:
            while self._connections:
                self._serve_once()
        finally:
            # After an exception here, too: a rank whose connection closes raises an error instead of waiting.
            for ends in self._connections.values():
                ends.close()

    def _serve_once(self) -> None:
        deadline = self._negotiator.next_deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        for ready in wait(list(self._ranks), patience):
            rank = self._ranks.get(ready)
            if rank is not None:  # None: an earlier connection in this loop has dropped the rank
                self._read(rank, ready is self._connections[rank].keepalive)
        self._send(self._negotiator.expire())

    def _read(self, rank: int, keepalive: bool) -> None:
        ends = self._connections[rank]
        try:
            if keepalive:
                self._ranks.pop(ends.keepalive)
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
        elif kind == "progress":
            self._negotiator.hear()
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
