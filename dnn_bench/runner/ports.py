"""Ports that stay free until the ranks that are told of them listen there."""

from __future__ import annotations

import socket


class HeldPort:
    """A TCP port of this machine that nobody else is given while this object lives.

    A port that is looked up, let go and told to ranks, which need seconds to start, may have become another
    process's by then. This one stays bound. As it does not listen, and both sides allow that addresses are
    used again (torch's stores do), a rank can listen on it all the same.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()
