"""Closing gives threads, descriptors and memory back at once, whatever happened before and whoever waits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from comm_core import (
    DirectTransport,
    Engine,
    EngineError,
    PythonTransport,
    RingTransport,
    local_channels,
    tcp_channel,
)
from tests.support.engines import on_ranks, run_step

ROOT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1"
LONG = 3600.0  # seconds that no test waits
SOON = 60.0  # seconds, for a busy machine
REASON = "rank 7: the optimizer is closed"


def threads_and_files() -> Counter[str]:
    """Return this process's threads by number, and what its descriptors are, without those of files."""
    found = Counter(f"thread {number}" for number in os.listdir("/proc/self/task"))
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # with a number: socket:[4242]
        except FileNotFoundError:
            continue  # of the listing itself
        if not target.startswith("/"):
            found[target] += 1
    return found


def left_over(before: Counter[str]) -> Counter[str]:
    """Return the threads and files that have come and stay. A joined thread may take a moment to leave /proc.

    Those of another test that end meanwhile do not count: so they are compared by number.
    """
    end = time.monotonic() + 60
    while (left := threads_and_files() - before) and time.monotonic() < end:
        time.sleep(0.001)
    return left


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def failure(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def over_local(size: int) -> list[Any]:
    return list(local_channels(size))


def over_tcp(size: int) -> list[Any]:
    store = HashStore()
    return on_ranks(size, lambda rank: tcp_channel(store, rank, size, HOST, timeout_seconds=LONG))


CHANNELS = [over_local, over_tcp]


def engine_over(channel: Any, rank: int, size: int, kind: Any = DirectTransport) -> Engine:
    engine = Engine(kind(channel, rank, size, segment_bytes=1024), rank, size, LONG)
    engine.add_bucket(torch.ones(size * 5000), name="weights")
    engine.install([("RS", 0), ("AG", 0)])
    return engine


def engines_over(channels: Sequence[Any], kind: Any = DirectTransport) -> list[Engine]:
    return [engine_over(channel, rank, len(channels), kind) for rank, channel in enumerate(channels)]


@pytest.mark.parametrize("kind", [DirectTransport, RingTransport])
@pytest.mark.parametrize("connect", CHANNELS)
def test_closing_gives_back_threads_and_descriptors(connect: Callable[[int], list[Any]], kind: Any) -> None:
    """Though engine and channel are still referenced, as by an optimizer in a reference cycle."""
    before = threads_and_files()
    channels = connect(3)
    engines = engines_over(channels, kind)
    on_ranks(3, lambda rank: run_step(engines[rank], [0]))
    assert threads_and_files() - before
    for engine in engines:
        engine.close()
    assert not left_over(before)
    assert len(channels) == 3


@pytest.mark.parametrize("connect", CHANNELS)
def test_closing_in_the_middle_of_a_step_gives_everything_back(connect: Callable[[int], list[Any]]) -> None:
    """Rank 0 waits for rank 1, in two threads: for its engine, and in an operation outside of the engine."""
    before = threads_and_files()
    engine, other = engines_over(connect(2))
    engine.begin_step()
    engine.mark_ready(0)
    errors: list[EngineError] = []
    threads = [
        threading.Thread(target=lambda: errors.append(failure(lambda: engine.wait_ag(0)))),
        threading.Thread(target=lambda: errors.append(failure(lambda: engine.wait_rs(0)))),
        threading.Thread(target=lambda: errors.append(failure(engine.wait_all))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    engine.close(REASON)
    other.close()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)
    assert not left_over(before)
    assert [(error.kind, str(error)) for error in errors] == [("aborted", REASON)] * 3


@pytest.mark.parametrize("connect", CHANNELS)
def test_a_transport_ends_the_operations_of_other_threads_before_it_gives_back_their_connections(
    connect: Callable[[int], list[Any]],
) -> None:
    before = threads_and_files()
    transports = [DirectTransport(channel, rank, 2) for rank, channel in enumerate(connect(2))]
    errors: list[EngineError] = []
    waiting = threading.Thread(
        target=lambda: errors.append(failure(lambda: transports[0].all_reduce(torch.ones(2000))))
    )
    waiting.start()
    time.sleep(0.1)
    transports[0].close(REASON)
    waiting.join(SOON)
    transports[1].close()
    assert not left_over(before)
    assert errors[0].kind == "aborted"
    assert str(failure(lambda: transports[0].all_reduce(torch.ones(2)))) == REASON
    transports[0].abort("nothing is left to abort")
    transports[0].set_timeout(1.0)
    transports[0].close("a second time")


@pytest.mark.parametrize("connect", CHANNELS)
@pytest.mark.parametrize("end", ["abort", "close"])
def test_closing_after_a_failure_gives_everything_back_and_errors_say_both(
    connect: Callable[[int], list[Any]], end: str
) -> None:
    before = threads_and_files()
    engine, other = engines_over(connect(2))
    on_ranks(2, lambda rank: run_step((engine, other)[rank], [0]))
    if end == "abort":
        other.abort("the disk of rank 1 is full")
    other.close()
    failed = failure(lambda: run_step(engine, [0]))
    assert failed.kind == "peer_lost"
    engine.close(REASON)
    assert not left_over(before)
    error = failure(engine.wait_all)
    assert str(error) == f"{REASON}; before that: {failed}"
    assert (error.kind, error.peer, error.step, error.name) == ("peer_lost", failed.peer, 2, "weights")
    assert engine.error() == str(failed)


@pytest.mark.parametrize("connect", [over_local, over_tcp])
@pytest.mark.parametrize("first", ["leaving", "staying"])
def test_the_reason_for_closing_reaches_a_rank_that_has_unread_messages(
    connect: Callable[[int], list[Any]], first: str
) -> None:
    """Bytes for a closed socket reset the connection, and the farewell stands behind unread messages."""
    for _ in range(10):
        leaving, staying = engines_over(connect(2))
        earlier = leaving if first == "leaving" else staying
        earlier.begin_step()
        earlier.mark_ready(0)
        time.sleep(0.005)  # its first messages arrive
        leaving.abort("the disk of rank 0 is full")
        leaving.close()
        failed = failure(lambda: run_step(staying, [0]) if first == "leaving" else staying.wait_all())  # noqa: B023
        assert "the disk of rank 0 is full" in str(failed)
        staying.close()


def test_a_closed_engine_refuses_everything_with_the_reason_but_shows_what_has_arrived() -> None:
    engines = engines_over(over_local(2))
    on_ranks(2, lambda rank: run_step(engines[rank], [0]))
    engine = engines[0]
    engine.close(REASON)
    calls: list[Callable[[], object]] = [
        engine.begin_step,
        lambda: engine.mark_ready(0),
        lambda: engine.mark_updated(0),
        engine.wait_all,
        lambda: engine.add_bucket(torch.ones(2)),
        engine.clear_buckets,
        lambda: engine.install([("AR", 0)]),
    ]
    for call in calls:
        error = failure(call)
        assert (error.kind, str(error)) == ("aborted", REASON)
    engine.wait_rs(0)
    engine.wait_ag(0)
    assert engine.ag_done(0)
    assert len(engine.events()) == 2
    assert engine.step == 1
    engine.abort("too late")
    assert engine.error() is None
    engines[1].close()


def test_closing_again_and_from_many_threads_does_nothing() -> None:
    before = threads_and_files()
    engines = engines_over(over_tcp(2))
    engines[0].begin_step()
    engines[0].mark_ready(0)
    on_ranks(8, lambda number: engines[number % 2].close(f"by thread {number}"))
    for engine in engines:
        engine.close()
    assert not left_over(before)


def test_closing_lets_go_of_the_buckets_memory() -> None:
    engine, other = engines_over(over_local(2))
    gradients = torch.ones(10)
    storage = weakref.ref(gradients.untyped_storage())
    engine.add_bucket(gradients)
    del gradients
    assert storage() is not None
    other.close()
    engine.close()
    assert storage() is None


def test_a_failed_engine_keeps_the_buckets_memory_until_it_is_closed() -> None:
    engine, other = engines_over(over_local(2))
    gradients = torch.ones(10)
    storage = weakref.ref(gradients.untyped_storage())
    engine.add_bucket(gradients)
    del gradients
    other.close()
    failure(lambda: run_step(engine, [0]))
    assert storage() is not None
    engine.close()
    assert storage() is None


class Collectives:
    rank, size = 0, 1

    def __init__(self, blocker: threading.Event | None = None) -> None:
        self.blocker = blocker

    def sum(self, full: torch.Tensor, name: str) -> None:
        if self.blocker is not None:
            self.blocker.wait()


def test_closing_lets_go_of_a_python_object_that_carries_out_the_operations() -> None:
    collectives = Collectives()
    gone = weakref.ref(collectives)
    engine = Engine(PythonTransport(collectives), 0, 1, LONG)
    del collectives
    engine.add_bucket(torch.ones(2))
    engine.install([("AR", 0)])
    run_step(engine, [0])
    assert gone() is not None
    engine.close()
    assert gone() is None


def test_an_operation_that_never_ends_delays_closing_for_seconds_only_and_gives_back_when_it_ends() -> None:
    before, blocker = threads_and_files(), threading.Event()
    collectives, gradients = Collectives(blocker), torch.ones(2)
    gone, storage = weakref.ref(collectives), weakref.ref(gradients.untyped_storage())
    engine = Engine(PythonTransport(collectives), 0, 1, LONG)
    engine.add_bucket(gradients)
    del collectives, gradients
    engine.install([("AR", 0)])
    engine.begin_step()
    engine.mark_ready(0)
    time.sleep(0.05)
    engine.close()  # does not wait for the operation for long: nobody ends it
    assert gone() is not None, "the operation uses it"
    assert storage() is not None, "the operation uses it"
    blocker.set()
    assert not left_over(before)
    assert gone() is None
    assert storage() is None


OTHER_RANK = """
import sys, time, torch
from torch.distributed import PrefixStore, TCPStore
from comm_core import DirectTransport, Engine, tcp_channel
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
channel = tcp_channel(PrefixStore("c", store), 1, 2, "127.0.0.1")
engine = Engine(DirectTransport(channel, 1, 2, 1024), 1, 2, 3600.0)
engine.add_bucket(torch.ones(10000), name="weights")
engine.install([("RS", 0), ("AG", 0)])
engine.begin_step()
engine.mark_ready(0)
engine.wait_all()
print("stepped", flush=True)
time.sleep(3600)
"""


@pytest.mark.dist
@pytest.mark.parametrize("waits", [True, False], ids=["during a step", "between steps"])
def test_closing_after_another_process_was_killed_gives_everything_back(waits: bool) -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    before = threads_and_files()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, str(store.port)], stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            prefixed = torch.distributed.PrefixStore("c", store)
            engine = engine_over(tcp_channel(prefixed, 0, 2, HOST), 0, 2)
            run_step(engine, [0])
            assert process.stdout is not None
            assert process.stdout.readline() == b"stepped\n"
            if waits:
                engine.begin_step()
                engine.mark_ready(0)
                timer = threading.Timer(0.2, process.send_signal, [signal.SIGKILL])
                timer.start()
                error = failure(engine.wait_all)
                assert (error.kind, error.peer) == ("peer_lost", 1)
                timer.join()
        finally:
            process.kill()
    engine.close(REASON)
    assert not left_over(before)
    assert str(failure(engine.wait_all)).startswith(REASON)


LATE = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from comm_core import EngineError, Waiting, ask_store, in_store_thread

class Slow:
    def __del__(self):  # keeps the interpreter in its end, while the answer comes
        time.sleep(2)

sys.modules["slow"] = Slow()
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=60), wait_for_workers=False)
def poll(asked):
    while not asked.cancelled():
        store.check(["answer"])

if sys.argv[2] == "polls":
    in_store_thread(poll)
try:
    ask_store(Waiting(1, 0.2), store.get, "answer")
except EngineError:
    print("late", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("act", ["waits", "polls"])
def test_a_store_that_answers_while_the_process_ends(act: str) -> None:
    """A failed rank ended with "terminate called without an active exception", and not with its error."""
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    command, pipe = [sys.executable, "-c", LATE, str(store.port), act], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as late:
        assert late.stdout is not None and late.stdout.readline() == "late\n"
        time.sleep(0.5)
        store.set("answer", "")
        shown = late.communicate(timeout=SOON)[1]
    assert late.returncode == 3, shown
