"""A closed backend gives everything back at once, and every later call says that the optimizer is closed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

import comm_core
from commsched.backends.cpu import EngineBackend
from commsched.backends.interface import StepWork
from commsched.errors import CommError
from tests.support.engines import on_ranks
from tests.support.local_backend import local_backend

CLOSED = "rank 0: the optimizer is closed"


def sockets() -> int:
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(name) and "socket" in os.readlink(name) for name in names)


def backends(size: int) -> list[EngineBackend]:
    channels = comm_core.local_channels(size)
    made = [local_backend(channels, rank) for rank in range(size)]
    for backend in made:
        backend.engine.add_bucket(torch.ones(size * 10), name="weights")
        backend.engine.install([("AR", 0)])
    return made


def step(backend: EngineBackend) -> None:
    backend.begin_step()
    backend.mark_ready(0)
    backend.wait_gathered(0)


CALLS: dict[str, Callable[[EngineBackend], object]] = {
    "install": lambda backend: backend.install(StepWork([], None, [])),  # type: ignore[arg-type]
    "begin_step": lambda backend: backend.begin_step(),
    "mark_ready": lambda backend: backend.mark_ready(0),
    "mark_updated": lambda backend: backend.mark_updated(0),
    "gather_now": lambda backend: backend.gather_now(torch.ones(2)),
    "gather_scalars": lambda backend: backend.gather_scalars(torch.tensor(1.0)),
    "exchange_seconds": lambda backend: backend.exchange_seconds(1000),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("fails", [False, True], ids=["closed", "failed and closed"])
def test_every_call_after_close_says_that_the_optimizer_is_closed(
    call: Callable[[EngineBackend], object], fails: bool
) -> None:
    mine, other = backends(2)
    on_ranks(2, lambda rank: step((mine, other)[rank]))
    if fails:
        other.abort("the disk is full")
    other.close()
    if fails:
        with pytest.raises(CommError, match="the disk is full"):
            step(mine)
    mine.close(orderly=not fails)
    mine.close()
    with pytest.raises(CommError, match=CLOSED):
        call(mine)


@pytest.mark.parametrize("wait", ["wait_reduced", "wait_gathered", "is_gathered"])
def test_waits_for_buckets_that_have_not_arrived_say_so_too(wait: str) -> None:
    mine, other = backends(2)
    on_ranks(2, lambda rank: step((mine, other)[rank]))
    getattr(mine, wait)(0)
    mine.begin_step()
    other.close()
    mine.close()
    with pytest.raises(CommError, match=CLOSED):
        getattr(mine, wait)(0)


def test_waits_in_other_threads_end_and_the_connections_are_given_back() -> None:
    gc.collect()
    before = sockets()
    mine, other = backends(2)
    mine.begin_step()
    mine.mark_ready(0)
    errors: list[str] = []

    def wait(call: Callable[[int], None]) -> None:
        with pytest.raises(CommError) as caught:
            call(0)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=[call]) for call in (mine.wait_gathered, mine.wait_reduced)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    gc.disable()
    try:
        mine.close()
        other.close()
        assert sockets() == before
    finally:
        gc.enable()
    for thread in threads:
        thread.join(60)
    assert [error[: len(CLOSED)] for error in errors] == [CLOSED] * 2
