"""Aborts whatever waits for a rank that is lost.

Whoever notices a loss tells this process's monitor and goes on: the connection to the coordinator (which
hears of ended processes and silent hosts), a backend's own connections, a launcher. The monitor's thread
aborts everything that was registered with that rank, so that no detector blocks in somebody else's locks.
Some waits cannot notice a loss themselves: gloo sees a connection that closes, but neither a silent host nor
a dead rank whose forked children hold its sockets; and a host that waits for its GPU looks at no connection.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

_log = logging.getLogger("commsched")
_PROBE_SECONDS = 0.2  # between two calls of each probe
_CLOSING_SECONDS = 5.0


class Abortable(Protocol):
    def abort(self, reason: str) -> None:
        """Ends every wait with an error, now and later. From any thread."""


Probe = Callable[[], "str | None"]
"""Returns at once: the reason why its owner must be aborted, or None."""


class FailureMonitor:
    """One for each process; nothing happens in forked children, which have no part in the job.

    The thread starts with the first report or probe: until then the monitor costs nothing.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ranks: weakref.WeakKeyDictionary[Abortable, frozenset[int]] = weakref.WeakKeyDictionary()
        self._probes: weakref.WeakKeyDictionary[Abortable, Probe] = weakref.WeakKeyDictionary()
        self._reports: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def register(self, waiter: Abortable, ranks: Iterable[int], probe: Probe | None = None) -> None:
        """Aborts ``waiter`` when one of ``ranks`` (of the job) is lost, or when ``probe`` gives a reason.

        The monitor does not keep the waiter alive; the probe must not either.
        """
        if os.getpid() != self._process:
            return  # before any lock: another thread may have held it at the fork
        with self._lock:
            self._ranks[waiter] = frozenset(ranks)
            if probe is not None:
                self._probes[waiter] = probe
        if probe is not None:
            self._tell(None)

    def unregister(self, waiter: Abortable) -> None:
        """Leaves alone a waiter that closes."""
        if os.getpid() == self._process:
            with self._lock:
                self._ranks.pop(waiter, None)
                self._probes.pop(waiter, None)

    def report(self, rank: int, reason: str) -> None:
        """Tells that a rank of the job is lost; returns at once. From any thread."""
        if os.getpid() == self._process:
            self._tell((rank, reason))

    def close(self) -> None:
        """Ends the thread: one that comes back from C++ while the interpreter ends aborts the process."""
        if self._thread is not None and os.getpid() == self._process:
            self._ended = True
            self._reports.put(None)
            self._thread.join(_CLOSING_SECONDS)

    def _tell(self, report: tuple[int, str] | None) -> None:
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
                self._abort_without(*report)

    def _probe_all(self) -> None:
        with self._lock:
            probes = list(self._probes.items())
        for waiter, probe in probes:
            reason = probe()
            if reason is not None:
                self.unregister(waiter)
                _abort(waiter, reason)

    def _abort_without(self, rank: int, reason: str) -> None:
        with self._lock:
            lost = [waiter for waiter, ranks in self._ranks.items() if rank in ranks]
        for waiter in lost:
            _abort(waiter, reason)


def _abort(waiter: Abortable, reason: str) -> None:
    try:
        waiter.abort(reason)
    except Exception:  # the others must be aborted all the same
        _log.exception("%s could not be aborted", type(waiter).__name__)


_monitor = FailureMonitor()
register, unregister, report = _monitor.register, _monitor.unregister, _monitor.report
atexit.register(_monitor.close)
