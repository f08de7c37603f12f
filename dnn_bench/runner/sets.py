"""`RankSet`: the ranks of one baseline, as one object that can be asked, stopped and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.registry import Baseline
from dnn_bench.launch import Place, Process

START_TIMEOUT = 120.0


class RankFailed(RuntimeError):
    """A rank of a baseline reported an error or died."""


class RankSet:
    """Starts a baseline's ranks; a context manager.

    While other baselines have their turn, the ranks are stopped with SIGSTOP, since some would otherwise go
    on polling and talking to each other.
    """

    def __init__(self, baseline: Baseline, job: Job, place: Place, directory: Path) -> None:
        self.baseline, self.job, self.place = baseline, job, place
        self.log = directory / f"{baseline.name}.log"
        self.address = str(directory / f"{baseline.name}.socket")
        self.connections: dict[int, Connection] = {}  # by rank, once ready
        self.pids: list[int] = []
        self.processes: list[Process] = []

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when every rank has built its model and found the others."""
        described = [json.dumps(asdict(self.baseline)), json.dumps(asdict(self.job))]
        program = ["-m", "dnn_bench.runner.worker", self.address, *described]
        with (
            Listener(self.address, "AF_UNIX", backlog=self.place.size) as listener,
            self.log.open("w") as log,
        ):
            self.processes = self.place.start(
                program, log, launcher=self.baseline.launcher, extra=self.baseline.environment
            )
            deadline = time.monotonic() + timeout
            unranked = [self._accept(listener, deadline) for _ in range(self.place.size)]
            self.pids = [self._receive(connection, deadline) for connection in unranked]
            for connection in unranked:
                rank, size = self._receive(connection, deadline)
                if size != self.place.size:
                    raise RankFailed(
                        f"{self.baseline.name}: {self.place.size} ranks were started, {size} found"
                    )
                self.connections[rank] = connection

    def call(self, command: str, *arguments: Any, timeout: float = 600.0) -> list[Any]:
        """Call a method on every rank; return the answers by rank."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # a rank that has died already is noticed below
                connection.send((command, arguments))
        deadline = time.monotonic() + timeout
        waiting = dict(self.connections)
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(
                    f"{self.baseline.name}: no answer to {command!r} from ranks {sorted(waiting)}"
                )
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                answers[rank] = self._receive(waiting.pop(rank), deadline)
        return [answers[rank] for rank in sorted(answers)]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """Ask the ranks to end, without waiting; `close` waits."""
        self.resume()
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.send(("close", ()))

    def close(self) -> None:
        """Ends the ranks, politely if they answer."""
        self.ask_to_end()
        deadline = time.monotonic() + (10 if self.connections else 0)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self._end_processes()
        for connection in self.connections.values():
            connection.close()
        self.connections, self.pids, self.processes = {}, [], []

    def _end_processes(self) -> None:
        """What is still there has not ended by itself: launchers and ranks with all they started."""
        left = [p for pid in [*self.pids, *(p.pid for p in self.processes)] for p in _family(pid)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _accept(self, listener: Listener, deadline: float) -> Connection:
        # Listener has no time-out of its own; its socket can be waited for like a connection.
        raw = listener._listener._socket  # type: ignore[attr-defined]
        while not wait([raw], timeout=0.2):
            if (
                any(process.poll() not in (None, 0) for process in self.processes)
                or time.monotonic() > deadline
            ):
                raise RankFailed(f"{self.baseline.name} did not start: {self._last_words()}")
        return listener.accept()

    def _receive(self, connection: Connection, deadline: float) -> Any:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"{self.baseline.name}: a rank does not answer in time: {self._last_words()}")
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            raise RankFailed(f"{self.baseline.name}: a rank died: {self._last_words()}") from None
        if kind == "error":
            raise RankFailed(f"{self.baseline.name}: {value}")
        return value

    def _last_words(self, lines: int = 8) -> str:
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "it said nothing"


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
