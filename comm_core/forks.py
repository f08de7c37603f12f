"""Forked children close their copies of this process's connections.

A child that lives on (a DataLoader's worker) would keep the connections open after this process has died, and
no other rank would notice the death. `comm_core._C` does the same for its own sockets.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


AnyClosable = TypeVar("AnyClosable", bound=Closable)
_connections: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(connection: AnyClosable) -> AnyClosable:
    """Returns `connection` (a socket, a Connection of multiprocessing), which forked children will close."""
    _connections.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_connections):
        with suppress(OSError):
            connection.close()  # only this process's descriptor: it sends nothing, as shutdown() would


os.register_at_fork(after_in_child=_close_all)
