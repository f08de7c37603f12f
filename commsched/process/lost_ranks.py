"""What ends when a rank is lost: everything over torch's gloo groups that would go on waiting for it.

Gloo notices a connection that closes, but neither a host that stops answering nor a dead rank whose forked
children still hold its connections, and a group cannot be told. So whoever waits for its messages is aborted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary


class Waiter(Protocol):
    """Something that may be waiting for messages of a group."""

    def abort(self, reason: str) -> None:
        """Its waits end with an error, now and later. Called from any thread."""


_ranks: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
_waiters: WeakKeyDictionary[Waiter, frozenset[int]] = WeakKeyDictionary()


def add_group(group: Any, ranks: Iterable[int]) -> None:
    """`ranks` of the job are the members of `group`."""
    _ranks[group] = frozenset(ranks)


def members(group: Any) -> frozenset[int]:
    """The job's ranks in `group`, none where it is not one of this job's."""
    return _ranks.get(group, frozenset())


def abort_without(ranks: Iterable[int], waiter: Waiter) -> None:
    """Abort `waiter` when one of `ranks` is lost."""
    _waiters[waiter] = frozenset(ranks)


def report(rank: int, reason: str) -> None:
    """Abort everything that waits for `rank`, which is lost."""
    for reference in _waiters.keyrefs():  # a list: other threads add waiters meanwhile
        waiter = reference()
        if waiter is not None and rank in _waiters[waiter]:
            waiter.abort(reason)


def _never_destroy() -> None:
    """Keep the parent's groups alive in a forked child: destroying one would take its sockets out of the
    epoll object that both share, and the parent would hear nothing of its peers any more.
    """
    for reference in _ranks.keyrefs():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference()))


os.register_at_fork(after_in_child=_never_destroy)
