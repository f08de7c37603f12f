"""Waiting for a forked rank, with a server that this test plays itself."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dnn_bench import fork_server
from dnn_bench.fork_server import Forked, ForkServer, tell


@pytest.fixture
def ends() -> Iterator[tuple[ForkServer, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = ForkServer(ours)
        yield server, theirs
        server.close()


def forked(ends: tuple[ForkServer, socket.socket], pid: int) -> Forked:
    server, theirs = ends
    tell(theirs, forked=pid)
    return server.spawn(["-m", "nothing"], {}, Path.cwd())


def test_a_launcher_sleeps_until_its_rank_has_ended(ends, monkeypatch):
    # It looked every 10 ms, which took time from the ranks on a machine whose cores all compute.
    monkeypatch.setattr(fork_server, "LOOK_SECONDS", 300.0)
    server, theirs = ends
    rank = forked(ends, 7)
    looks, look = [], server.await_end
    monkeypatch.setattr(server, "await_end", lambda *given: looks.append(given) or look(*given))
    end = threading.Timer(0.2, tell, [theirs], {"ended": 7, "code": 3})
    end.start()
    assert rank.wait() == 3
    assert len(looks) == 1
    end.join()


def test_a_wait_ends_with_its_timeout_and_keeps_what_others_wait_for(ends, monkeypatch):
    monkeypatch.setattr(fork_server, "LOOK_SECONDS", 300.0)
    _, theirs = ends
    seventh, eighth = forked(ends, 7), forked(ends, 8)
    tell(theirs, ended=8, code=1)
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        seventh.wait(0.05)
    assert 0.05 <= time.monotonic() - start < fork_server.LOOK_SECONDS
    assert eighth.poll() == 1
    assert seventh.poll() is None


def test_a_pid_that_the_system_gives_again_is_another_rank(ends):
    # The second rank seemed to have ended before it ran, with the first one's exit status.
    _, theirs = ends
    first = forked(ends, 7)
    tell(theirs, ended=7, code=0)
    second = forked(ends, 7)
    assert second.poll() is None
    tell(theirs, ended=7, code=3)
    assert (first.poll(), second.poll()) == (0, 3)
