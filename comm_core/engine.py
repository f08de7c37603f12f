"""The C++ engine, closed when the interpreter ends."""

from __future__ import annotations

import atexit
import weakref

from comm_core import _C

# The field `op` of Engine.events() is an index into this.
OPS = ("RS", "AG", "AR")


class Engine(_C.Engine):
    """Runs a plan of reduce-scatters and all-gathers once per step, on a thread of its own without the GIL.

    Any thread may call its methods. After the first failure every mark, and every wait for a
    bucket that has not arrived, raises that error.
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


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    # An engine's thread must end before the interpreter does: a Python transport calls into it.
    for engine in list(_open_engines):
        engine.close()


atexit.register(_close_all)
