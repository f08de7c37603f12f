"""Notices that another rank is gone while this rank's host waits for its GPU.

In ``loss.item()`` the host waits for kernels that wait for another rank, and reads no connection. The failure
monitor's thread probes connections that carry no data but a farewell message.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from comm_core import TcpConnection

_FAREWELL = b"!"


class PeerConnections:
    """``connections``: one for each rank, None for this one; ``other_failure`` returns other failures."""

    def __init__(
        self,
        rank: int,
        connections: Sequence[TcpConnection | None],
        other_failure: Callable[[], str | None],
    ) -> None:
        self._rank, self._other_failure = rank, other_failure
        self._lock = threading.Lock()  # descriptors are not closed while they are polled
        self._poll = select.poll()
        self._peers = {
            handle.fileno(): (peer, one)
            for peer, one in enumerate(connections)
            if one is not None
            for handle in (one.data, one.host.keepalive)
        }
        for number in self._peers:
            self._poll.register(number, select.POLLIN)

    def problem(self) -> str | None:
        """Return why the collectives of this rank cannot end, or None. Does not block."""
        with self._lock:
            if not self._peers:
                return None  # closed
            problem = self._other_failure()
            for number, _ in self._poll.poll(0):
                self._poll.unregister(number)
                problem = problem or self._ending(*self._peers[number])
            return problem

    def _ending(self, peer: int, connection: TcpConnection) -> str | None:
        """Return what is wrong with a connection that poll() reports; None after a farewell."""
        lost = connection.host.lost()
        if lost:
            return f"rank {self._rank}: rank {peer} is lost: its {lost}"
        with suppress(OSError):
            if connection.data.recv(1, socket.MSG_PEEK) == _FAREWELL:
                return None
        return (
            f"rank {self._rank}: rank {peer} is gone: its process or its host ended without closing its"
            f" optimizer; look at the output of rank {peer}"
        )

    def close(self, farewell: bool) -> None:
        """Close the connections. Without a ``farewell`` the other ranks then abort their waits."""
        with self._lock:
            for _, connection in self._peers.values():
                with suppress(OSError):
                    if farewell:
                        connection.data.send(_FAREWELL)
                connection.data.close()
                connection.host.keepalive.close()
            self._peers.clear()
