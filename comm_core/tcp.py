"""TCP connections between the ranks of one job, which find each other through a c10d store."""

from __future__ import annotations

import atexit
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from itertools import combinations
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import DistError, Store

from comm_core import _C
from comm_core.errors import EngineError
from comm_core.forks import close_in_children
from comm_core.handshake import Lost, Member, Waiting, accept_all, dial, none_lost

HOST_TIMEOUT = 25.0
_PROBES = 4  # unanswered ones after which a host is lost
_LONGEST = 32767  # seconds between two, of Linux
_NO_CONNECTION = -1, -1, ""
_EXIT_SECONDS = 5.0  # for threads that ask a store
_asking: WeakKeyDictionary[Thread, Future[Any]] = WeakKeyDictionary()


class Host:
    """The host at the other end of `keepalive`, a connection that carries no data.

    The host's kernel answers TCP keepalive probes, however busy its processes are. Without an answer for
    about `timeout_seconds` the connection fails, and poll() reports it. Probes stop while bytes are
    unacknowledged or the receiver's window is full, so this works only on a connection without data.
    """

    def __init__(self, keepalive: socket.socket | Connection, timeout_seconds: float) -> None:
        self.keepalive: Any = keepalive
        self._lost = ""
        interval = min(max(1, round(timeout_seconds / (_PROBES + 1))), _LONGEST)
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
    lost: Lost = none_lost,
) -> _C.TcpChannel:
    """Connect this rank to all others. Each of the `size` ranks must call, with the same `store`.

    Wrap a shared store in a PrefixStore, so that no two channels use the same keys. `address` is where the
    other ranks reach this one; by default the address from which this rank reaches the store's host. The
    channel fails once a host's kernel has not answered for `host_timeout_seconds`. `lost` is polled with the
    ranks that have not connected yet; the wait for them ends with the reason that it returns, if any.
    """
    connections = tcp_connections(store, rank, size, address, timeout_seconds, host_timeout_seconds, lost)
    return _C.TcpChannel(rank, descriptors(connections))


def descriptors(connections: Sequence[TcpConnection | None]) -> list[tuple[int, int, str]]:
    """Return the connections as C++ takes them over: two file descriptors and the other end's address."""
    return [
        (one.data.detach(), one.host.keepalive.detach(), one.host.address) if one else _NO_CONNECTION
        for one in connections
    ]


def tcp_connections(
    store: Store,
    rank: int,
    size: int,
    address: str | None = None,
    timeout_seconds: float = 300.0,
    host_timeout_seconds: float = HOST_TIMEOUT,
    lost: Lost = none_lost,
    star: bool = False,
) -> list[TcpConnection | None]:
    """Connect like `tcp_channel()`, but return sockets: one connection for each rank, None for this one.

    With `star` only rank 0 is connected to the others.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, size), but rank is {rank} and size is {size}")
    dialled = range(min(rank, 1) if star else rank)
    awaited = range(size if star and rank else rank + 1, size)
    waiting = Waiting(rank, timeout_seconds, lost)
    with _listen(address or ("127.0.0.1" if size == 1 else _own_address(store))) as listener:
        found = _connect_all(store, listener, waiting, size, dialled, awaited)
    for end in found.values():
        end.setblocking(True)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return [
        TcpConnection(found[peer, False], Host(found[peer, True], host_timeout_seconds))
        if (peer, False) in found
        else None
        for peer in range(size)
    ]


def local_channels(size: int) -> list[_C.TcpChannel]:
    """Return connected channels for `size` ranks that are threads of this process."""
    return [_C.TcpChannel(rank, row) for rank, row in enumerate(local_descriptors(size))]


def local_descriptors(size: int) -> list[list[tuple[int, int, str]]]:
    """Return for each rank what `descriptors()` returns, where the ranks are threads of this process."""
    rows = [[_NO_CONNECTION] * size for _ in range(size)]
    for one, other in combinations(range(size), 2):
        ends = socket.socketpair()
        rows[one][other], rows[other][one] = ((end.detach(), -1, "this process") for end in ends)
    return rows


def _listen(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        # Where the backlog is full, a rank tries again only after a second: strangers must not fill it.
        server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        return close_in_children(server)
    except OSError as error:
        raise EngineError(f"cannot listen at {host}: {error}", kind="usage") from error


def _connect_all(
    store: Store, listener: socket.socket, waiting: Waiting, size: int, dialled: range, awaited: range
) -> dict[tuple[int, bool], socket.socket]:
    """Return two sockets for each other rank; `True` marks the one for keepalives."""
    found: dict[tuple[int, bool], socket.socket] = {}
    try:
        if waiting.rank == 0:
            ask_store(waiting, store.set, "token", secrets.token_hex(16))  # before the address
        host, port = listener.getsockname()[:2]
        ask_store(waiting, store.set, f"address/{waiting.rank}", f"{host} {port}")
        own = Member(_with_secret(_published(store, "token", 0, waiting)), waiting.rank, size)
        for peer in dialled:
            name, number = _published(store, f"address/{peer}", peer, waiting).decode().split()
            for keepalive in (False, True):
                found[peer, keepalive] = dial((name, int(number)), peer, keepalive, own, waiting)
        accept_all(listener, own, awaited, found, waiting)
    except BaseException as error:
        for end in found.values():
            end.close()  # at once: the ranks at the other ends wait for this one
        if isinstance(error, DistError):
            problem = str(error).splitlines()[0]  # without the C++ frames
            message = f"the ranks' store does not answer: {problem}; look for an error in rank 0's output"
            raise EngineError(message, kind="peer_lost", rank=waiting.rank) from error
        raise
    return found


def _with_secret(token: bytes) -> bytes:
    """Return the key of the handshakes: whoever reaches the store reads `token`, but not the job's own one.

    Read here and not passed: every connection between ranks goes through here, and none may be without.
    """
    secret = os.environ.get("COMMSCHED_JOB_TOKEN", "").strip()
    return hmac.digest(os.fsencode(secret), token, "sha256") if secret else token


def _published(store: Store, key: str, peer: int, waiting: Waiting) -> bytes:
    while not ask_store(waiting, store.check, [key]):
        time.sleep(waiting.next(peer, f"rank {peer} did not publish its address", [peer]))
    return ask_store(waiting, store.get, key)


def ask_store(waiting: Waiting, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return a store's answer, for which it has the whole time-out: a rank that is late is not its fault.

    Torch's own reads of a connection have no time limit: without this thread a rank would wait for ever for a
    store whose process is stopped, or whose host is cut off.
    """
    asking = Waiting(waiting.rank, waiting.seconds, waiting.lost)
    answer = in_store_thread(lambda _: call(*arguments))
    late = "the ranks' store, in the process of rank 0 or of its launcher, did not answer"
    while not wait([answer], asking.next(0, late)).done:
        pass
    return answer.result()


def in_store_thread(ask: Callable[[Future[Any]], Any]) -> Future[Any]:
    """Return what `ask` returns or raises in a thread; it is given the future, which may be cancelled."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            found = ask(answer)
        except BaseException as error:
            with suppress(InvalidStateError):  # nobody waits any more
                answer.set_exception(error)
        else:
            with suppress(InvalidStateError):
                answer.set_result(found)

    thread = Thread(target=run, name="commsched-store", daemon=True)
    _asking[thread] = answer
    thread.start()
    return answer


@atexit.register
def _end_store_threads() -> None:
    """Wait for them: a thread that comes back from C++ after the end of Python aborts the process."""
    threads, end = list(_asking.items()), time.monotonic() + _EXIT_SECONDS
    for _, answer in threads:
        answer.cancel()
    for thread, _ in threads:
        thread.join(max(0.0, end - time.monotonic()))


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
