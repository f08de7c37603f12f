"""The guardian of a process kills it when it is stopped, and ends with it. Processes without torch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from commsched.elastic import guardian

# It leaves the context when its standard input ends.
PROGRAM = """
import runpy, sys
with runpy.run_path(sys.argv[1])["killed_when_stopped"](0.6):
    sys.stdin.read()
"""
ATTACH, DETACH = 16, 17  # requests of ptrace()


@pytest.fixture
def watched():
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, guardian.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        yield process, children[0]
        process.kill()


@pytest.mark.parametrize("end", ["stopped", "killed", "leaves"])
def test_a_process_and_its_guardian_end(watched, end):
    """The other ranks of an elastic job waited for a stopped one until a time-out ended the job."""
    process, child = watched
    if end == "leaves":
        process.communicate(timeout=60)
    else:
        process.send_signal(signal.SIGSTOP if end == "stopped" else signal.SIGKILL)
    assert process.wait(60) == (0 if end == "leaves" else -signal.SIGKILL)
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # its parent may not wait for it
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_short_stops_and_debuggers_do_not_count(watched):
    process, child = watched
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    if ctypes.CDLL(None).ptrace(ATTACH, process.pid, None, None) == 0:
        os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(0.9)
        assert psutil.Process(process.pid).status() == psutil.STATUS_TRACING_STOP
        ctypes.CDLL(None).ptrace(DETACH, process.pid, None, None)
    assert process.poll() is None and child.is_running()


def test_without_room_for_a_guardian_training_goes_on(monkeypatch, caplog):
    def no_room(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(guardian.subprocess, "Popen", no_room)
    with guardian.killed_when_stopped():
        pass
    assert "the others would wait for this rank if it is stopped: Resource" in caplog.text
