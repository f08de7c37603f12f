"""Aborts every object that waits for a lost rank.

Detectors report a lost rank to this process's monitor and do not wait: the connection to the coordinator
(which notices ended processes and silent hosts), a backend's own connections, a launcher. The monitor's
thread then aborts every object registered for that rank. Detectors do not abort, because an abort may block
on a lock that the detector's thread holds. Code that waits for connections polls `lost()` instead.

Some waits cannot detect a lost rank themselves. A channel does not notice a dead rank whose forked children
hold its sockets; a thread that waits for its GPU reads no connection.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

_log = logging.getLogger("commsched")
_PROBE_SECONDS = 0.2  # between two calls of each probe
_CLOSE_SECONDS = 5.0


class Abortable(Protocol):
    def abort(self, reason: str) -> None:
        """End every wait with an error, now and later. May be called from any thread."""


Probe = Callable[[], "str | None"]
"""Return the reason why the registered object must be aborted, or None. Must not block."""


class FailureMonitor:
    """Aborts registered objects when a rank is lost. Does nothing in forked children: they are no ranks.

    The thread starts with the first report or probe, so that a monitor without either costs nothing.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # Reentrant: while a thread holds it, the collector may free a waiter there, which unregisters itself.
        self._lock = threading.RLock()
        # The job that each waiter belongs to, and its ranks there: the next job's have the same numbers.
        self._ranks: weakref.WeakKeyDictionary[Abortable, tuple[int, frozenset[int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._job = 0
        self._probes: weakref.WeakKeyDictionary[Abortable, Probe] = weakref.WeakKeyDictionary()
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._reports: queue.SimpleQueue[tuple[int, int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def register(self, waiter: Abortable, ranks: Iterable[int], probe: Probe | None = None) -> None:
        """Abort ``waiter`` when one of ``ranks`` (of the job) is lost, or when ``probe`` returns a reason.

        The monitor holds the waiter weakly; the probe must not hold it strongly.
        """
        if os.getpid() != self._process:
            return  # before the lock, which a thread of the parent may have held at the fork
        with self._lock:
            self._ranks[waiter] = self._job, frozenset(ranks)
            if probe is not None:
                self._probes[waiter] = probe
        if probe is not None:
            self._wake(None)

    def unregister(self, waiter: Abortable) -> None:
        """Do not abort ``waiter`` any more."""
        if os.getpid() == self._process:
            with self._lock:
                self._ranks.pop(waiter, None)
                self._probes.pop(waiter, None)

    def report(self, rank: int, reason: str) -> None:
        """Report that a rank of the job is lost. Does not block; may be called from any thread."""
        if os.getpid() == self._process:
            self._lost.setdefault(rank, reason)
            self._wake((self._job, rank, reason))

    def note_left(self, rank: int, reason: str) -> None:
        """Note that a rank has left the job in order. Aborts nothing: what it has sent may still be read."""
        self._left.setdefault(rank, reason)

    def lost(self, ranks: Iterable[int], awaited: Iterable[int] = ()) -> str:
        """Return why the first of ``ranks`` (of the job) that is lost is lost, "" if none is.

        Also why the first of those has left that are ``awaited``: they would have to make a connection yet.
        """
        lost = [self._lost[rank] for rank in ranks if rank in self._lost]
        return next(iter(lost + [self._left[rank] for rank in awaited if rank in self._left]), "")

    def begin_job(self) -> None:
        """Forget the lost ranks of an earlier job of this process: the new one's have the same numbers."""
        self._job += 1
        self._lost.clear()
        self._left.clear()

    def close(self) -> None:
        """End the thread: returning from C++ while the interpreter shuts down would abort the process."""
        if self._thread is not None and os.getpid() == self._process:
            self._ended = True
            self._reports.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _wake(self, report: tuple[int, int, str] | None) -> None:
        self._reports.put(report)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="commsched-failures", daemon=True)
                self._thread.start()

    # -- the monitor's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended:
            self._probe_all()
            try:
                report = self._reports.get(timeout=_PROBE_SECONDS if self._probes else None)
            except queue.Empty:
                continue
            if report is not None:
                job, rank, reason = report
                with self._lock:
                    known = [(waiter, self._ranks.get(waiter, (-1, ()))) for waiter in _alive(self._ranks)]
                for waiter, (its_job, ranks) in known:
                    if its_job == job and rank in ranks:
                        _abort(waiter, reason)

    def _probe_all(self) -> None:
        with self._lock:
            probes = [(waiter, self._probes.get(waiter)) for waiter in _alive(self._probes)]
        for waiter, probe in probes:
            reason = None if probe is None else probe()
            if reason is not None:
                self.unregister(waiter)
                _abort(waiter, reason)


def _alive(waiters: weakref.WeakKeyDictionary[Abortable, Any]) -> list[Abortable]:
    """Return the keys that exist. ``items()`` fails if the collector frees one that unregisters itself."""
    return [waiter for reference in waiters.keyrefs() if (waiter := reference()) is not None]


def _abort(waiter: Abortable, reason: str) -> None:
    try:
        waiter.abort(reason)
    except Exception:  # the other waiters must still be aborted
        _log.exception("%s could not be aborted", type(waiter).__name__)


_monitor = FailureMonitor()
register, unregister, report = _monitor.register, _monitor.unregister, _monitor.report
note_left, lost, begin_job = _monitor.note_left, _monitor.lost, _monitor.begin_job
atexit.register(_monitor.close)
