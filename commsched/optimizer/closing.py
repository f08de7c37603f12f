"""The end of a distributed optimizer: on request, with its last reference, or with the process."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

from commsched.backends.interface import Backend
from commsched.errors import CommError
from commsched.optimizer.hooks import Hooks
from commsched.optimizer.reducer import Reducer
from commsched.optimizer.reports import StepReports, Timeline


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_exiting = False


def close_at_exit(thing: Closable) -> None:
    """Close it before the engine's and the collectives' exit handlers run."""
    _open.add(thing)
    _register()


@cache
def _register() -> None:

    def close_all() -> None:
        global _exiting
        _exiting = True
        for thing in list(_open):
            thing.close()

    atexit.register(close_all)


def close(
    owner: int,
    backend: Backend,
    hooks: Hooks,
    reducer: Reducer,
    timeline: Timeline | None,
    reports: StepReports | None,
    wait: bool = True,
) -> None:
    """End the parts of a driver."""
    if os.getpid() != owner:
        return  # a forked child: the backend, and the timeline's file, are its parent's
    if reports is not None:
        reports.close()
    hooks.remove()
    # Other ranks may still need this one's part of the last step, and the model this rank's last update. A
    # script that ends with an exception must not wait: the others find out when the connections close.
    orderly = wait and not (_exiting and hasattr(sys, "last_type"))
    if orderly:
        with suppress(CommError):
            reducer.drain()
    backend.close(orderly)
    reducer.close()
    if timeline is not None:
        timeline.close()
