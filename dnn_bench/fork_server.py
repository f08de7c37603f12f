"""Forks ranks from processes that have imported torch, which takes about five seconds of a processor's time.

    process = server(index, base).spawn(["-m", "some.module", "argument"], environment, folder, output)

`process` can be used like a subprocess.Popen: pid, poll, wait, kill, returncode. This file is both the client
and the server. A forked rank has a session, an environment and outputs of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import json
import math
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# A forked rank inherits the seed of hashes. Ranks with different seeds catch a plan that depends on a set's
# order, so ranks with neighbouring indices come from different servers.
SERVERS = 2
# Programs read these variables when they need them. Any other variable may have been read before the fork: by
# Python, by torch or by the loader.
LATE = tuple("COMMSCHED_ CASES_ PYTEST_ RANK LOCAL_ GROUP_ WORLD_SIZE MASTER_ DNN_BENCH_ SLURM".split())

# The process that shares its servers, and the folder of their sockets.
SHARED = "DNN_BENCH_FORK_SERVERS"

LOOK_SECONDS = 0.5  # between two looks at a rank's end: another thread may have read the message
Output = Any  # a file, a descriptor, subprocess.DEVNULL, or None for this process's own output


def can_fork(environment: Mapping[str, str], base: Mapping[str, str]) -> bool:
    """Whether `environment` differs from a server's, `base`, only in variables that are read late."""
    names = environment.keys() | base.keys()
    return all(name.startswith(LATE) for name in names if environment.get(name) != base.get(name))


class ForkServer:
    """A connection to a process that forks ranks. `start` starts one, which ends with this process."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[Any] | None = None) -> None:
        self._socket, self._process, self._owner = connection, process, os.getpid()
        self._running: dict[int, Forked] = {}  # by pid, which the system gives again to a later rank
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        environment: Mapping[str, str],
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
        path: Path | None = None,
    ) -> ForkServer:
        """Start a server with this environment. Other processes can connect to it at `path`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            descriptors = [theirs.fileno()]
            if path is not None:
                listener.bind(str(path))
                listener.listen(64)
                descriptors.append(listener.fileno())
            process = popen(
                [sys.executable, __file__, *map(str, descriptors)],
                env=dict(environment),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(ours, process)

    @classmethod
    def connect(cls, path: Path) -> ForkServer:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def spawn(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: Output = None,
        errors: Output = None,
    ) -> Forked:
        """Run `python PROGRAM...` in `folder`; `output` takes both of its output streams, or `errors` one."""
        order = {"program": list(program), "environment": dict(environment), "folder": str(folder)}
        with contextlib.ExitStack() as stack:
            first = _descriptor(output, 1, stack)
            second = _descriptor(output if errors is None else errors, 2, stack)
            self._socket.setblocking(True)
            socket.send_fds(self._socket, [json.dumps(order).encode()], [first, second])
        while "forked" not in (message := self._receive()):
            self._note_end(message)
        forked = self._running[message["forked"]] = Forked(self, message["forked"])
        return forked

    def await_end(self, forked: Forked, seconds: float) -> None:
        """Give a forked rank that ends within this long its exit status."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while forked.returncode is None:
                self._note_end(self._receive())

    def _note_end(self, message: dict[str, int]) -> None:
        self._running.pop(message["ended"]).returncode = message["code"]

    def close(self) -> None:
        if os.getpid() != self._owner or self._socket.fileno() < 0:
            return
        self._socket.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _receive(self) -> Any:
        message = self._socket.recv(1 << 16)
        if not message:
            raise RuntimeError("the fork server of ranks has ended")
        return json.loads(message)


def _descriptor(output: Output, default: int, stack: contextlib.ExitStack) -> int:
    if output is None:
        return default
    if output == subprocess.DEVNULL:
        return stack.enter_context(open(os.devnull, "wb")).fileno()
    return output if isinstance(output, int) else int(output.fileno())


class Forked:
    """A forked rank, with the part of subprocess.Popen's interface that launchers use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None:
            self._server.await_end(self, seconds)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        # Sleeps until the server sends something: waking up often would take time from ranks that are timed.
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if (code := self.poll(min(remaining, LOOK_SECONDS))) is not None:
                return code
            if not remaining:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def share() -> None:
    """Let programs that this process starts use this process's servers."""
    owner, folder = os.getpid(), tempfile.mkdtemp(prefix="fork-servers-")
    os.environ[SHARED] = f"{owner} {folder}"

    def remove() -> None:
        if os.getpid() == owner:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def server(index: int, environment: Mapping[str, str]) -> ForkServer:
    """A server on this machine for the ranks of this index."""
    early = {name: value for name, value in environment.items() if not name.startswith(LATE)}
    return _server(os.getpid(), index % SERVERS, frozenset(early.items()))


@cache
def _server(process: int, index: int, environment: frozenset[tuple[str, str]]) -> ForkServer:
    """One server for each index and environment. With `process`, a fork of this process makes its own."""
    if SHARED not in os.environ:
        return ForkServer.start(dict(environment))
    owner, folder = os.environ[SHARED].split(" ", 1)
    kind = hashlib.sha256(json.dumps([sys.executable, *sorted(environment)]).encode()).hexdigest()[:16]
    path = Path(folder, f"{kind}.{index}")
    if int(owner) == process:
        return ForkServer.start(dict(environment), path=path)
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        return ForkServer.connect(path)
    return ForkServer.start(dict(environment))


Task = tuple[dict[str, Any], Sequence[int]]  # the order that `spawn` has sent, and the outputs


# -- in the server -------------------------------------------------------------------------------------------


def serve(owner: socket.socket, listener: socket.socket | None = None) -> Task | None:
    """Fork for the owner and for all who connect, until the owner is gone.

    Returns None then, and in every child what the child has to do.
    """
    running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: the pid, and who is told of its end
    with selectors.DefaultSelector() as ready:
        ready.register(owner, selectors.EVENT_READ)
        if listener is not None:
            ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                client = key.fileobj
                if key.fd in running:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    pid, waiting = running.pop(key.fd)
                    tell(waiting, ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                assert isinstance(client, socket.socket)
                if client is listener:
                    ready.register(client.accept()[0], selectors.EVENT_READ)
                    continue
                order, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 2)
                if not order and client is owner:
                    return None
                if not order:
                    ready.unregister(client)
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    close_all(key.fileobj for key in ready.get_map().values())
                    return json.loads(order), list(descriptors)
                close_all(descriptors)
                descriptor = os.pidfd_open(pid)
                running[descriptor] = pid, client
                ready.register(descriptor, selectors.EVENT_READ)
                tell(client, forked=pid)


def close_all(files: Iterable[Any]) -> None:
    for file in list(files):
        if isinstance(file, socket.socket):
            file.close()
        else:
            os.close(file)


def tell(client: socket.socket, **message: int) -> None:
    with contextlib.suppress(OSError):  # a client that is gone
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
    import torch._dynamo  # noqa: F401  torch's first optimizer imports it
    from numba.core.registry import cpu_target

    # A process loads these with its first compiled function.
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    gc.freeze()  # collections in forks, and their searches for modules, pass over everything imported here

    task = serve(*(socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]))
    if task is not None:
        become(*task)
