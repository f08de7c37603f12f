"""TCP connections between the ranks of one job, which find each other through a c10d store."""

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

    The host's kernel answers TCP keepalive probes, however busy its processes are. Without an answer for
    about `timeout_seconds` the connection fails, and poll() reports it.
    """

    def __init__(self, keepalive: socket.socket | Connection, timeout_seconds: float) -> None:
        self.keepalive = keepalive
        self.address = _C.peer_address(keepalive.fileno())
        self._lost = ""
        _C.set_keepalive(keepalive.fileno(), timeout_seconds)

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
    mesh, addresses, token = _exchange_addresses(store, rank, size, address, timeout_seconds)
    return mesh.join(addresses, token, timeout_seconds, host_timeout_seconds)


def tcp_connections(
    store: Store,
    rank: int,
    size: int,
    address: str | None = None,
    timeout_seconds: float = 300.0,
    host_timeout_seconds: float = HOST_TIMEOUT,
) -> list[TcpConnection | None]:
    """Connect like `tcp_channel()`, but return sockets: one connection for each rank, None for this one."""
    mesh, addresses, token = _exchange_addresses(store, rank, size, address, timeout_seconds)
    connected = mesh.connect(addresses, token, timeout_seconds, host_timeout_seconds)
    return [_connection(*pair, host_timeout_seconds) if min(pair) >= 0 else None for pair in connected]


def _connection(data: int, keepalive: int, host_timeout_seconds: float) -> TcpConnection:
    sockets = [close_in_children(socket.socket(fileno=number)) for number in (data, keepalive)]
    return TcpConnection(sockets[0], Host(sockets[1], host_timeout_seconds))


def _exchange_addresses(
    store: Store, rank: int, size: int, address: str | None, timeout_seconds: float
) -> tuple[_C.TcpMesh, list[tuple[str, int]], str]:
    """Return this rank's mesh, every rank's address, and a token that rejects connections of other jobs."""
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
                f"rank {peer} did not publish its address within {timeout_seconds:g} s; look for an error in"
                " its output",
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
        probe.connect(target)  # a datagram socket sends nothing here: it only looks up the route
        return str(probe.getsockname()[0])
