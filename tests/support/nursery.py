"""Ranks forked from a process that has imported torch, which takes five seconds of a processor's time.

    rank = spawn(index, argv, env, cwd, output)     # as subprocess.Popen: pid, poll, wait, returncode

This file is both the helper for tests and the program that forks. A forked rank has a session, an environment
and outputs of its own and ends as any Python process does. It inherits the seed of hashes; every index of a
rank has a nursery of its own, since ranks whose seeds differ catch a plan that depends on a set's order.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

NURSERIES = 4
# Read by programs. Everything else may have been read before the fork: by Python, torch, or the loader.
LATE = ("COMMSCHED_", "CASES_", "PYTEST_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")


# -- in the tests --------------------------------------------------------------------------------------------


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment may come from a nursery, which has the present process's."""
    own = _environment()
    return all(name.startswith(LATE) for name in env.keys() | own.keys() if env.get(name) != own.get(name))


def spawn(index: int, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: Path) -> Forked:
    """A process that goes on as ``capture.py`` with these arguments, its output appended to a file."""
    return _nursery(os.getpid(), index % NURSERIES).fork(
        {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "output": str(output)}
    )


class Forked:
    """A nursery's child, for those who know subprocess.Popen."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code


class Nursery:
    """The process that forks; ends when this one does, since it then reads the end of its socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        self._codes: dict[int, int] = {}

    def fork(self, order: dict[str, Any]) -> Forked:
        self._socket.setblocking(True)
        self._socket.send(json.dumps(order).encode())
        while "forked" not in (said := self._hear()):
            self._codes[said["ended"]] = said["code"]
        return Forked(self, said["forked"])

    def code_of(self, pid: int) -> int | None:
        self._socket.setblocking(False)
        try:
            while pid not in self._codes:
                said = self._hear()
                self._codes[said["ended"]] = said["code"]
        except BlockingIOError:
            return None
        return self._codes.pop(pid)

    def _hear(self) -> Any:
        said = self._socket.recv(1 << 16)
        if not said:
            raise RuntimeError(f"the nursery of ranks ended with {self._process.wait(10)}")
        return json.loads(said)


@cache
def _nursery(owner: int, index: int) -> Nursery:
    """By process, too: a fork of the present one must not speak into its sockets."""
    return Nursery()


@cache
def _environment() -> dict[str, str]:
    from tests.support.launch import clean_environment

    return clean_environment()


# -- in the nursery ------------------------------------------------------------------------------------------


def serve(tests: socket.socket) -> dict[str, Any] | None:
    """Forks until the tests are gone. Returns None then, and in every child its order."""
    with selectors.DefaultSelector() as ready:
        ready.register(tests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.data is not None:
                    _, status = os.waitpid(key.data, 0)
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    tell(tests, ended=key.data, code=os.waitstatus_to_exitcode(status))
                    continue
                order = tests.recv(1 << 20)
                if not order:
                    return None
                pid = os.fork()
                if pid == 0:
                    for other in ready.get_map().values():
                        os.close(other.fd)
                    tests.detach()
                    return dict(json.loads(order))
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                tell(tests, forked=pid)


def tell(tests: socket.socket, **said: int) -> None:
    tests.send(json.dumps(said).encode())


def become(order: dict[str, Any]) -> None:
    """What exec and subprocess would have done."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    output = os.open(order["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = order["argv"]


if __name__ == "__main__":
    import capture  # beside this file
    import numba  # noqa: F401
    import torch._dynamo  # noqa: F401  torch's first optimizer imports it

    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        become(order)
        capture.main()
