"""Notices that another rank is gone while this rank's host waits for its GPU.

In ``loss.item()`` the host waits for kernels that wait for another rank, and cannot look at a connection. A
thread looks at connections that carry a farewell only, and aborts the collectives that a dead rank left.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from comm_core import TcpConnection

_FAREWELL = b"!"
# Seconds between two looks at failures that the connections do not show.
_LOOK_AGAIN = 0.5
_CLOSING_SECONDS = 5.0


class PeerWatch:
    """``connections``: one for each rank, None for this one. ``failed`` is called once, with the reason."""

    def __init__(
        self,
        rank: int,
        connections: Sequence[TcpConnection | None],
        other_failure: Callable[[], str | None],
        failed: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._peers = {
            handle.fileno(): (peer, one)
            for peer, one in enumerate(connections)
            if one is not None
            for handle in (one.data, one.host.keepalive)
        }
        self._other_failure, self._failed = other_failure, failed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commsched-peers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for number in self._peers:
            poll.register(number, select.POLLIN)
        while not self._closing.is_set():
            problem = self._other_failure()
            for number, _ in poll.poll(_LOOK_AGAIN * 1e3):
                poll.unregister(number)
                peer, connection = self._peers[number]
                problem = problem or self._ending(peer, connection)
            if problem and not self._closing.is_set():
                self._failed(problem)
                return

    def _ending(self, peer: int, connection: TcpConnection) -> str | None:
        """What is wrong with a connection that has something to say: nothing, after a farewell."""
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
        """With a ``farewell`` this rank leaves in good order; else the others end what waits for it."""
        self._closing.set()
        for _, connection in self._peers.values() if farewell else ():
            with suppress(OSError):
                connection.data.send(_FAREWELL)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)
        for _, connection in self._peers.values():
            connection.data.close()
            connection.host.keepalive.close()
        self._peers.clear()
