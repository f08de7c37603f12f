"""TCP connections between the ranks of one job, which find each other through a c10d store."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch.distributed import Store

from comm_core import _C
from comm_core.errors import EngineError
from comm_core.forks import close_in_children

HOST_TIMEOUT = 25.0
_PROBES = 4  # unanswered ones after which a host is lost
_GREETING = struct.Struct("32sIII")  # token, rank, number of ranks, 1 for the keepalive connection
_NO_CONNECTION = -1, -1, ""


class Host:
    """The host at the other end of `keepalive`, a connection that carries no data.

    The host's kernel answers TCP keepalive probes, however busy its processes are. Without an answer for
    about `timeout_seconds` the connection fails, and poll() reports it. Probes stop while bytes are
    unacknowledged or the receiver's window is full, so this works only on a connection without data.
    """

    def __init__(self, keepalive: socket.socket | Connection, timeout_seconds: float) -> None:
        self.keepalive: Any = keepalive
        self._lost = ""
        interval = max(1, round(timeout_seconds / (_PROBES + 1)))
        with socket.socket(fileno=os.dup(keepalive.fileno())) as handle:
            self.address = str(handle.getpeername()[0])
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
            handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)

    def lost(self) -> str:
        """Return why the host is lost; "" if it is not, or if only its process has ended."""
        self._lost = self._lost or _C.lost_host(self.keepalive.fileno(), self.address)
        return self._lost


class TcpConnection(NamedTuple):
    """A connection to another rank, and that rank's host."""

    data: socket.socket
    host: Host


def tcp_channel(
    store: Store,
    rank: int,
    size: int,
    address: str | None = None,
    timeout_seconds: float = 300.0,
    host_timeout_seconds: float = HOST_TIMEOUT,
) -> _C.TcpChannel:
    """Connect this rank to all others. Each of the `size` ranks must call, with the same `store`.

    Wrap a shared store in a PrefixStore, so that no two channels use the same keys. `address` is where the
    other ranks reach this one; by default the address from which this rank reaches the store's host. The
    channel fails once a host's kernel has not answered for `host_timeout_seconds`.
    """
    connections = tcp_connections(store, rank, size, address, timeout_seconds, host_timeout_seconds)
    rows = [
        (one.data.detach(), one.host.keepalive.detach(), one.host.address) if one else _NO_CONNECTION
        for one in connections
    ]
    return _C.TcpChannel(rank, rows)


def tcp_connections(
    store: Store,
    rank: int,
    size: int,
    address: str | None = None,
    timeout_seconds: float = 300.0,
    host_timeout_seconds: float = HOST_TIMEOUT,
    star: bool = False,
) -> list[TcpConnection | None]:
    """Connect like `tcp_channel()`, but return sockets: one connection for each rank, None for this one.

    With `star` only rank 0 is connected to the others.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, size), but rank is {rank} and size is {size}")
    deadline = time.monotonic() + timeout_seconds
    dialled = range(min(rank, 1) if star else rank)
    awaited = range(size if star and rank else rank + 1, size)
    with _listen(address or ("127.0.0.1" if size == 1 else _own_address(store)), 2 * size) as listener:
        host, port = listener.getsockname()[:2]
        store.set(f"address/{rank}", f"{host} {port}")
        if rank == 0:
            store.set("token", secrets.token_hex(16))
        addresses = [_address_of(store, peer, rank, timeout_seconds) for peer in dialled]
        own = store.get("token"), rank, size
        found = {
            (peer, keepalive): _dial(addresses[peer], peer, (*own, keepalive), deadline)
            for peer in dialled
            for keepalive in (False, True)
        }
        found |= _accept_all(listener, own, awaited, deadline)
    for end in found.values():
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return [
        TcpConnection(found[peer, False], Host(found[peer, True], host_timeout_seconds))
        if (peer, False) in found
        else None
        for peer in range(size)
    ]


def local_channels(size: int) -> list[_C.TcpChannel]:
    """Return connected channels for `size` ranks that are threads of this process."""
    rows = [[_NO_CONNECTION] * size for _ in range(size)]
    for one, other in combinations(range(size), 2):
        ends = socket.socketpair()
        rows[one][other], rows[other][one] = ((end.detach(), -1, "this process") for end in ends)
    return [_C.TcpChannel(rank, row) for rank, row in enumerate(rows)]


def _listen(host: str, backlog: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return close_in_children(socket.create_server((host, 0), family=family, backlog=backlog))
    except OSError as error:
        raise EngineError(f"cannot listen at {host}: {error}", kind="usage") from error


def _dial(
    address: tuple[str, int], peer: int, greeting: tuple[bytes, int, int, bool], deadline: float
) -> socket.socket:
    try:
        left = max(0.001, deadline - time.monotonic())
        connection = close_in_children(socket.create_connection(address, left))
        connection.sendall(_GREETING.pack(*greeting))
    except OSError as error:
        where = ":".join(map(str, address))
        message = f"rank {peer} at {where} cannot be reached: {error}"
        raise EngineError(message, kind="peer_lost", rank=greeting[1], peer=peer) from error
    return connection


def _accept_all(
    listener: socket.socket, own: tuple[bytes, int, int], peers: Iterable[int], deadline: float
) -> dict[tuple[int, bool], socket.socket]:
    """Accept both connections of each of these ranks. A silent stranger delays nobody."""
    missing = {(peer, keepalive) for peer in peers for keepalive in (False, True)}
    found: dict[tuple[int, bool], socket.socket] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = sorted({peer for peer, _ in missing})
                message = f"not all ranks connected in time; missing: {ranks}"
                raise EngineError(message, kind="timeout", rank=own[1], peer=ranks[0])
            for key, _ in waiting.select(left):
                guest: Any = key.fileobj
                if guest is listener:
                    _let_in(listener, waiting)
                    continue
                piece = b""
                with suppress(OSError):
                    piece = guest.recv(_GREETING.size - len(key.data))
                key.data.extend(piece)
                if piece and len(key.data) < _GREETING.size:
                    continue
                waiting.unregister(guest)
                who = _who(key.data, own)
                if who in missing:
                    found[who] = guest
                    missing.remove(who)
                else:
                    guest.close()
        for key in waiting.get_map().values():
            if key.fileobj is not listener:
                key.fileobj.close()  # type: ignore[union-attr]
    return found


def _let_in(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    with suppress(OSError):  # the other end has closed already
        guest = close_in_children(listener.accept()[0])
        guest.setblocking(False)
        waiting.register(guest, selectors.EVENT_READ, bytearray())


def _who(greeting: bytearray, own: tuple[bytes, int, int]) -> tuple[int, bool]:
    """Return the rank that a greeting names, and whether its connection is the keepalive one; -1: nobody."""
    if len(greeting) < _GREETING.size:
        return -1, False
    token, peer, size, keepalive = _GREETING.unpack(greeting)
    known = secrets.compare_digest(token, own[0]) and size == own[2]
    return (peer, bool(keepalive)) if known else (-1, False)


def _address_of(store: Store, peer: int, rank: int, timeout_seconds: float) -> tuple[str, int]:
    try:
        store.wait([f"address/{peer}"], timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise EngineError(
            f"rank {peer} did not publish its address within {timeout_seconds:g} s; look for an error in its"
            " output",
            kind="timeout",
            rank=rank,
            peer=peer,
        ) from error
    host, port = store.get(f"address/{peer}").decode().split()
    return host, int(port)


def _own_address(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if not host:
        raise ValueError(
            f"tcp_channel() over a {type(store).__name__} needs address=, the address of this rank: "
            "only a TCPStore knows a host that all ranks reach"
        )
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket sends nothing here: it only looks up the route
        return str(probe.getsockname()[0])
