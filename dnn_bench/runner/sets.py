"""`RankSet`: the ranks of one baseline, which can be asked, stopped and resumed; `Crew`: those of many."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

from dnn_bench.baselines import Baseline, require
from dnn_bench.baselines.trainer import Job
from dnn_bench.launch import Place, Process, ThisMachine

START_TIMEOUT = 120.0


class RankFailed(RuntimeError):
    """A rank of a baseline reported an error or died."""


class RankSet:
    """Starts a baseline's ranks.

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

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Returns when every rank has built its model and found the others."""
        described = [json.dumps(self.baseline.for_ranks()), json.dumps(asdict(self.job))]
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
        """End launchers and ranks that have not ended by themselves, with all they started."""
        left = []
        for pid in [*self.pids, *(process.pid for process in self.processes)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(psutil.Process(pid))
                left += left[-1].children(recursive=True)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=60)  # killed is not gone: a busy machine takes its time
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _accept(self, listener: Listener, deadline: float) -> Connection:
        # Listener has no time-out of its own; its socket can be waited for like a connection.
        raw = listener._listener._socket  # type: ignore[attr-defined]
        while not wait([raw], timeout=0.2):
            failed = any(process.poll() not in (None, 0) for process in self.processes)
            if failed or time.monotonic() > deadline:
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


def asked(baseline: Baseline, job: Job, place: Place, command: str, *arguments: Any) -> list[Any]:
    """The answers of new ranks to one command; they end then."""
    require(baseline)
    with tempfile.TemporaryDirectory(prefix="dnn_bench-") as folder:
        with contextlib.closing(RankSet(baseline, job, place, Path(folder))) as ranks:
            ranks.start()
            return ranks.call(command, *arguments)


class Crew:
    """Ranks for comparisons of one job on the same hosts; a context manager that ends them all.

    Ranks that stay need not be started and checked again. Baselines that plan for the link must not stay when
    the link becomes another.
    """

    def __init__(self) -> None:
        self.errors: dict[str, float | None] = {}  # of the first steps, of baselines that passed their check
        self._sets: dict[str, RankSet] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="dnn_bench-")
        self._references: dict[str, Path] = {}  # by job

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.dismiss(lambda ranks: True)
        self._folder.cleanup()

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def ranks(self, baseline: Baseline, job: Job, place: Place) -> RankSet:
        """The baseline's ranks, running if they have stayed, else new and not started."""
        if baseline.name not in self._sets:
            self._sets[baseline.name] = RankSet(baseline, job, place, Path(self._folder.name))
        return self._sets[baseline.name]

    def dismiss(self, unwanted: Callable[[RankSet], bool]) -> None:
        """Ends ranks: all are asked first, so that they end side by side."""
        leaving = [ranks for ranks in self._sets.values() if unwanted(ranks)]
        for ranks in leaving:
            ranks.ask_to_end()
        for ranks in leaving:
            ranks.close()
            del self._sets[ranks.baseline.name]

    def reference(self, job: Job, size: int) -> Path:
        """The single-process result, by a process of its own, so that this one stays small."""
        described = json.dumps(asdict(job))
        if described not in self._references:
            path = Path(self._folder.name) / f"reference{len(self._references)}.pt"
            program = ["-m", "dnn_bench.runner.worker", "--reference", str(path), str(size), described]
            with path.with_suffix(".log").open("w+") as log:
                (process,) = ThisMachine(1).start(program, log)
                try:
                    code = process.wait()
                finally:
                    process.kill()
                log.seek(0)
                if code != 0:
                    raise ValueError(f"{job.model} cannot be trained in one process:\n{log.read()[-2000:]}")
            self._references[described] = path
        return self._references[described]
