"""Joins the ranks of one job by TCP connections of their own, agreed on through a c10d store."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from torch.distributed import Store

from comm_core import _C
from comm_core._C import HOST_TIMEOUT
from comm_core.errors import EngineError
from comm_core.forks import close_in_children


class Host:
    """The host at the other end of `keepalive`, a connection that carries no data.

    Its kernel answers for it, whatever its processes do; without an answer for about `timeout_seconds` the
    connection fails, and poll() says so.
    """

    def __init__(self, keepalive: socket.socket | Connection, timeout_seconds: float) -> None:
        self.keepalive = keepalive
        self.address = _C.peer_address(keepalive.fileno())
        self._lost = ""
        _C.set_keepalive(keepalive.fileno(), timeout_seconds)

    def lost(self) -> str:
        """What is wrong with the host, "" where nothing is or its process has ended."""
        self._lost = self._lost or _C.lost_host(self.keepalive.fileno(), self.address)
        return self._lost


class TcpConnection(NamedTuple):
    """One rank's connection to another, and the host that it leads to."""

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
    """The channel of this rank; every one of the `size` ranks that share `store` must make it.

    `address` is where the other ranks reach this one; by default the address from which this rank reaches the
    host of the store. The store must be this channel's own: wrap a shared one in a PrefixStore. A host that
    does not answer for `host_timeout_seconds` is an error, whatever its ranks compute meanwhile.
    """
    mesh, addresses, token = _met(store, rank, size, address, timeout_seconds)
    return mesh.join(addresses, token, timeout_seconds, host_timeout_seconds)


def tcp_connections(
    store: Store,
    rank: int,
    size: int,
    address: str | None = None,
    timeout_seconds: float = 300.0,
    host_timeout_seconds: float = HOST_TIMEOUT,
) -> list[TcpConnection | None]:
    """The same connections as sockets: a pair for each rank, None for this one."""
    mesh, addresses, token = _met(store, rank, size, address, timeout_seconds)
    connected = mesh.connect(addresses, token, timeout_seconds, host_timeout_seconds)
    return [_connection(*pair, host_timeout_seconds) if min(pair) >= 0 else None for pair in connected]


def _connection(data: int, keepalive: int, host_timeout_seconds: float) -> TcpConnection:
    first, second = (close_in_children(socket.socket(fileno=number)) for number in (data, keepalive))
    return TcpConnection(first, Host(second, host_timeout_seconds))


def _met(
    store: Store, rank: int, size: int, address: str | None, timeout_seconds: float
) -> tuple[_C.TcpMesh, list[tuple[str, int]], str]:
    """This rank's end of a mesh, every rank's address, and the token that keeps strangers out."""
    mesh = _C.TcpMesh(rank, size, address or ("127.0.0.1" if size == 1 else _own_address(store)))
    store.set(f"address/{rank}", f"{mesh.host} {mesh.port}")
    if rank == 0:
        store.set("token", secrets.token_hex(16))
    addresses = []
    for peer in range(size):
        try:
            store.wait([f"address/{peer}"], timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise EngineError(
                f"rank {peer} did not come within {timeout_seconds:g} s; look at its output, did it end?",
                kind="timeout",
                rank=rank,
                peer=peer,
            ) from error
        host, port = store.get(f"address/{peer}").decode().split()
        addresses.append((host, int(port)))
    return mesh, addresses, store.get("token").decode()


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
        probe.connect(target)  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
