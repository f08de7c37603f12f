"""Closes this process's connections in forked children.

A forked child that outlives this process (a DataLoader's worker) would keep the connections open, and no
other rank would notice that this one has ended. `comm_core._C` closes its own sockets in the same way.
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
    """Return `connection` (a socket or multiprocessing Connection); forked children close their copy."""
    _connections.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_connections):
        with suppress(OSError):
            connection.close()  # unlike shutdown(), closes only this process's descriptor and sends nothing


os.register_at_fork(after_in_child=_close_all)
