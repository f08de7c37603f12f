"""Waiting for a forked rank, with a server that this test plays itself."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator

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


def test_a_launcher_sleeps_until_its_rank_has_ended(ends, monkeypatch):
    # It looked every 10 ms, which took time from the ranks on a machine whose cores all compute.
    monkeypatch.setattr(fork_server, "LOOK_SECONDS", 300.0)
    server, theirs = ends
    looks, look = [], server.code_of
    monkeypatch.setattr(server, "code_of", lambda *given: looks.append(given) or look(*given))
    end = threading.Timer(0.2, tell, [theirs], {"ended": 7, "code": 3})
    end.start()
    assert Forked(server, 7).wait() == 3
    assert len(looks) == 1
    end.join()


def test_a_wait_ends_with_its_timeout_and_keeps_what_others_wait_for(ends, monkeypatch):
    monkeypatch.setattr(fork_server, "LOOK_SECONDS", 300.0)
    server, theirs = ends
    tell(theirs, ended=8, code=1)
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        Forked(server, 7).wait(0.05)
    assert 0.05 <= time.monotonic() - start < fork_server.LOOK_SECONDS
    assert Forked(server, 8).poll() == 1
    assert Forked(server, 7).poll() is None
