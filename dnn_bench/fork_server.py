"""Forks ranks from processes that have imported torch, which takes about five seconds of a processor's time.

    process = server(index, base).spawn(["-m", "some.module", "argument"], environment, folder, output)

`process` can be used like a subprocess.Popen: pid, poll, wait, kill, returncode. This file is both the client
and the server. A forked rank has a session, an environment and outputs of its own and ends as any Python
process does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# A forked rank inherits the seed of hashes. Ranks with different seeds catch a plan that depends on a set's
# order, so ranks with neighbouring indices come from different servers.
SERVERS = 4
# Programs read these variables when they need them. Any other variable may have been read before the fork: by
# Python, by torch or by the loader.
LATE = ("COMMSCHED_", "CASES_", "PYTEST_", "RANK", "LOCAL_", "GROUP_", "WORLD_SIZE", "MASTER_")

Output = Any  # a file, a descriptor, subprocess.DEVNULL, or None for this process's own output


def can_fork(environment: Mapping[str, str], base: Mapping[str, str]) -> bool:
    """Whether `environment` differs from a server's, `base`, only in variables that are read late."""
    names = environment.keys() | base.keys()
    return all(name.startswith(LATE) for name in names if environment.get(name) != base.get(name))


class ForkServer:
    """A process that forks ranks. It ends when this process ends or calls `close`."""

    def __init__(
        self, environment: Mapping[str, str], start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
    ) -> None:
        self._owner = os.getpid()
        self._codes: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start(
                [sys.executable, __file__, str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)

    def spawn(
        self, program: Sequence[str], environment: Mapping[str, str], folder: Path, output: Output = None
    ) -> Forked:
        """Run `python PROGRAM...` in `folder`; `output` takes both of its output streams."""
        order = {"program": list(program), "environment": dict(environment), "folder": str(folder)}
        with contextlib.ExitStack() as stack:
            if output == subprocess.DEVNULL:
                output = stack.enter_context(open(os.devnull, "wb"))
            if output is None:
                descriptors = [1, 2]
            else:
                descriptors = [output if isinstance(output, int) else output.fileno()] * 2
            self._socket.setblocking(True)
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
        while "forked" not in (message := self._receive()):
            self._codes[message["ended"]] = message["code"]
        return Forked(self, message["forked"])

    def code_of(self, pid: int) -> int | None:
        """The exit status of a forked rank that has ended; None while it runs."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while pid not in self._codes:
                message = self._receive()
                self._codes[message["ended"]] = message["code"]
        return self._codes.get(pid)

    def close(self) -> None:
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def _receive(self) -> Any:
        message = self._socket.recv(1 << 16)
        if not message:
            raise RuntimeError(f"the fork server of ranks ended with status {self._process.wait(10)}")
        return json.loads(message)


class Forked:
    """A forked rank, with the part of subprocess.Popen's interface that launchers use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@cache
def _server(owner: int, index: int, environment: frozenset[tuple[str, str]]) -> ForkServer:
    """One server for each index and environment. With `owner`, a fork of this process makes its own."""
    return ForkServer(dict(environment))


def server(index: int, environment: Mapping[str, str]) -> ForkServer:
    """A server on this machine for the ranks of this index."""
    early = {name: value for name, value in environment.items() if not name.startswith(LATE)}
    return _server(os.getpid(), index % SERVERS, frozenset(early.items()))


# -- in the server -------------------------------------------------------------------------------------------


def serve(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork until the client is gone. Returns None then; in every child it returns the child's order and
    outputs.
    """
    with selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.data is not None:
                    _, status = os.waitpid(key.data, 0)
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    tell(client, ended=key.data, code=os.waitstatus_to_exitcode(status))
                    continue
                order, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 2)
                if not order:
                    return None
                pid = os.fork()
                if pid == 0:
                    for other in ready.get_map().values():
                        os.close(other.fd)
                    client.detach()
                    return dict(json.loads(order)), list(descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                tell(client, forked=pid)


def tell(client: socket.socket, **message: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the next read finds that the client is gone
        client.send(json.dumps(message).encode())


def become(order: dict[str, Any], outputs: Sequence[int]) -> None:
    """Do what exec and subprocess would have done, then run the program."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    for target, descriptor in zip((1, 2), outputs, strict=True):
        os.dup2(descriptor, target)
    for descriptor in outputs:
        os.close(descriptor)
    program: list[str] = order["program"]
    if program[0] == "-m":
        sys.path[0] = order["folder"]
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).parent)
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    import numba  # noqa: F401
    import torch._dynamo  # noqa: F401  torch's first optimizer imports it

    task = serve(socket.socket(fileno=int(sys.argv[1])))
    if task is not None:
        become(*task)
