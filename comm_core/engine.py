"""The engine as Python sees it: the C++ class, closed when the interpreter ends."""

from __future__ import annotations

import atexit
import weakref

from comm_core import _C

# What the numbers in the field `op` of Engine.events() stand for.
OPS = ("RS", "AG", "AR", "UPDATE")


class Engine(_C.Engine):
    """Runs a plan of reduce-scatters and all-gathers on a thread of its own, once per step, without the GIL.

    Every call may come from any thread. The first failure is kept: from then on marks and waits raise it.
    """

    def __init__(
        self,
        transport: _C.Transport,
        rank: int,
        size: int,
        timeout_seconds: float = 300.0,
        max_events: int = 1 << 15,
    ) -> None:
        super().__init__(transport, rank, size, timeout_seconds, max_events)
        _open_engines.add(self)


def HubTransport(
    hub: _C.Hub, rank: int, segment_bytes: int = 1 << 18, depth: int = 4, ring: bool = False
) -> _C.Transport:
    """The transport of one rank of an in-process hub: tests run several engines in one process with it."""
    kind = _C.RingTransport if ring else _C.DirectTransport
    return kind(hub.channel(rank), rank, hub.size, segment_bytes=segment_bytes, depth=depth)


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    # An engine's thread must not outlive the interpreter: a Python transport would call into nothing.
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_all)
