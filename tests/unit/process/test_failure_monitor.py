"""The failure monitor: who is aborted, by which thread, and what it leaves alone."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commsched.errors import CommError
from commsched.process import groups
from commsched.process.failure_monitor import FailureMonitor

PATIENCE = 60.0  # seconds; nothing here takes longer on a slow machine


class Waiter:
    def __init__(self, fails: bool = False) -> None:
        self.aborted, self.fails = threading.Event(), fails
        self.reasons: list[tuple[str, str]] = []

    def abort(self, reason: str) -> None:
        self.reasons.append((reason, threading.current_thread().name))
        self.aborted.set()
        if self.fails:
            raise RuntimeError("cannot be aborted")


@pytest.fixture
def monitor() -> Iterator[FailureMonitor]:
    monitor = FailureMonitor()
    yield monitor
    monitor.close()
    assert monitor._thread is None or not monitor._thread.is_alive()


def test_a_lost_rank_aborts_those_that_wait_for_it(monitor: FailureMonitor) -> None:
    of_0_and_1, of_2, of_1 = Waiter(fails=True), Waiter(), Waiter()
    for waiter, ranks in ((of_0_and_1, (0, 1)), (of_2, (2,)), (of_1, (1,))):
        monitor.register(waiter, ranks)
    assert monitor._thread is None, "a process without failures needs no thread"
    monitor.report(1, "rank 1 is gone")
    for waiter in (of_0_and_1, of_1):
        assert waiter.aborted.wait(PATIENCE)
        assert waiter.reasons == [("rank 1 is gone", "commsched-failures")]
    monitor.report(2, "rank 2 too")  # the error of the first one has not ended the thread
    assert of_2.aborted.wait(PATIENCE) and len(of_1.reasons) == 1


def test_lost_ranks_can_be_asked_for_until_the_next_job_begins(monitor: FailureMonitor) -> None:
    monitor.report(1, "rank 1 is gone")
    monitor.report(1, "rank 1 does not answer")
    assert monitor.lost([0, 1]) == "rank 1 is gone" and monitor.lost([0, 2]) == ""
    monitor.begin_job()
    assert monitor.lost([0, 1]) == ""


def test_a_rank_that_has_left_ends_only_waits_for_its_connection(monitor: FailureMonitor) -> None:
    """What it has sent may still be read, so nothing is aborted."""
    waiter = Waiter()
    monitor.register(waiter, (1, 2))
    monitor.note_left(1, "rank 1 has left the job")
    assert monitor.lost([0, 1, 2]) == monitor.lost([0, 1, 2], [0, 2]) == ""
    assert monitor.lost([0, 1, 2], [2, 1]) == "rank 1 has left the job"
    monitor.report(2, "rank 2 died")
    assert waiter.aborted.wait(PATIENCE) and [reason for reason, _ in waiter.reasons] == ["rank 2 died"]
    assert monitor.lost([0, 1, 2], [1]) == "rank 2 died"
    monitor.begin_job()
    assert monitor.lost([0, 1, 2], [1]) == ""


def test_the_rank_whose_leaving_ends_a_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the error is made, nobody is asked for a second time: a rank that has left is not a lost one."""
    gone = SimpleNamespace(lost=lambda ranks, awaited=(): "rank 5 has left" if list(awaited) == [5] else "")
    monkeypatch.setattr(groups, "failure_monitor", gone)

    def connect(*arguments: Any) -> None:
        raise RuntimeError(arguments[-1]([1]))

    launch = SimpleNamespace(rank=3)
    meeting: Any = SimpleNamespace(launch=launch, store=torch.distributed.HashStore(), address="127.0.0.1")
    with pytest.raises(CommError, match="from 127.0.0.1: rank 5 has left$"):
        groups.connected(meeting, connect, "name", [3, 5], 1.0)


def test_the_detector_does_not_wait_for_the_abort(monitor: FailureMonitor) -> None:
    """An abort may take locks that the detector's thread holds."""
    held = threading.Lock()

    class Locked(Waiter):
        def abort(self, reason: str) -> None:
            with held:
                super().abort(reason)

    waiter = Locked()
    monitor.register(waiter, (1,))
    with held:
        monitor.report(1, "rank 1 is gone")
        assert not waiter.aborted.is_set()
    assert waiter.aborted.wait(PATIENCE)


def test_a_probe_aborts_its_owner_once(monitor: FailureMonitor) -> None:
    waiter, other, calls = Waiter(), Waiter(), threading.Semaphore(0)

    def healthy() -> None:
        calls.release()

    monitor.register(waiter, (), lambda: "the connection closed")
    monitor.register(other, (), healthy)
    assert waiter.aborted.wait(PATIENCE)
    for _ in range(3):
        assert calls.acquire(timeout=PATIENCE)
    assert len(waiter.reasons) == 1 and not other.reasons


def test_what_has_ended_is_left_alone(monitor: FailureMonitor) -> None:
    closed, kept = Waiter(), Waiter()
    dropped = Waiter()
    of_dropped = weakref.ref(dropped)
    for waiter in (closed, dropped, kept):
        monitor.register(waiter, (1,), lambda: None)
    monitor.unregister(closed)
    del waiter, dropped
    while of_dropped() is not None:
        gc.collect()  # the thread may be looking at it just now
    monitor.report(1, "rank 1 is gone")
    assert kept.aborted.wait(PATIENCE) and not closed.reasons


def test_a_forked_child_aborts_nothing(monitor: FailureMonitor) -> None:
    waiter = Waiter()
    monitor.register(waiter, (1,))
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with monitor._lock:
            held.set()
            forked.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        monitor.report(1, "rank 1 is gone")
        monitor.register(Waiter(), (1,), lambda: "never")
        monitor.unregister(waiter)
        monitor.close()
        os._exit(0 if not waiter.reasons and monitor._thread is None else 1)
    forked.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_waiters_that_are_freed_while_others_are_looked_up_unregister_themselves(
    monitor: FailureMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run in any line, in a thread that holds the monitor's lock."""
    first, second, freed = Waiter(), Waiter(), Waiter()
    for waiter in (first, freed, second):
        monitor.register(waiter, (1,))
    waiters = monitor._ranks

    class Collecting:
        def get(self, waiter: Waiter, default: object) -> object:
            monitor.unregister(freed)
            return waiters.get(waiter, default)

        def __getattr__(self, name: str) -> object:
            return getattr(waiters, name)

    monkeypatch.setattr(monitor, "_ranks", Collecting())
    monitor.report(1, "rank 1 is gone")
    for waiter in (first, second):
        assert waiter.aborted.wait(PATIENCE)
    assert not freed.reasons
