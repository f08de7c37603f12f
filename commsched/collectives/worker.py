"""The torch engine's two threads: one listens to the coordinator, one runs what it says in the order it
says."""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from commsched.collectives.coordinator import HostLost, connect, send
from commsched.collectives.execution import Executor
from commsched.collectives.negotiation import Key, Message
from commsched.collectives.operation import Operation, device_name
from commsched.collectives.timeline import Timeline
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.rendezvous import Meeting

_CLOSING_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_SHUT_DOWN = "commsched was shut down before the operation ran"


class Worker:
    """Submits this rank's operations and runs them. Alone, it runs them at once in the calling thread."""

    def __init__(self, meeting: Meeting) -> None:
        self.timeline: Timeline | None = None
        self._meeting, self._executor = meeting, Executor(meeting)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pending: dict[Key, Operation] = {}
        self._broken: str | None = None
        self._verdict = threading.Event()  # `_broken` is set
        self._without_rank_0 = "rank 0 is gone: its process ended, and with it the coordinator of the job"
        self._rank_0_left = False
        self._leaving = False
        self._join: Operation | None = None
        self._last_news = time.monotonic()
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._alone = meeting.launch.size == 1
        if not self._alone:
            self._line, self._coordinator = connect(meeting)
            self._threads = [
                threading.Thread(target=work, name=f"commsched-{name}", daemon=True)
                for name, work in (("listener", self._listen), ("runner", self._run))
            ]
            for thread in self._threads:
                thread.start()

    # -- the calling thread ----------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Announce an operation; it runs when all ranks have. ``ValueError`` where its name is still in
        use."""
        self._check_process(operation.name)
        operation.submitted = time.monotonic()
        operation.ready = self._executor.record_ready(operation)
        if self._alone:
            self._run_alone(operation)
            return
        with self._lock:
            if operation.key in self._pending:
                raise ValueError(
                    f"an operation named {operation.name!r} has not ended yet; wait for it with "
                    "synchronize(), or give this one another name"
                )
            self._announce(operation, operation.request(self._meeting.launch.node))
            self._pending[operation.key] = operation

    def _check_process(self, what: str) -> None:
        """Before any lock: another thread may have held it at the fork, and will never give it back here."""
        if os.getpid() != self._process:
            raise CommError(
                f"{what} can not run: this process was forked from rank {self._meeting.launch.rank}, and "
                "only the process that called init() has a part in the job; call it there"
            )

    def _run_alone(self, operation: Operation) -> None:
        message = {
            "request": operation.request("localhost"),
            "joined": [],
            "rows": [[t.shape[0] for t in operation.tensors if t.dim()]],
            "splits": [operation.splits],
            "new_set": None,
            "removed": False,
        }
        if operation.kind in ("allgather", "reducescatter") and any(not t.dim() for t in operation.tensors):
            operation.finish(
                error=CommError(
                    f"{operation.name}: {operation.kind} needs tensors with at least one dimension"
                )
            )
            return
        self._execute(operation, message)

    def _announce(self, operation: Operation, message: Message) -> None:
        """Under the lock. The error is the same whether the job broke before the operation or while it
        waited."""
        try:
            if self._broken:
                raise CommError(self._broken)
            self._tell(message)
        except CommError as error:
            raise CommError(f"{operation.name} failed: {error}") from error

    def _tell(self, message: Message) -> None:
        try:
            send(self._line.messages, message)
        except OSError as error:
            raise CommError(self._broken or self._without_rank_0) from error

    def wait(self, operation: Operation) -> Any:
        """The operation's result, as soon as there is one. No news at all for longer than the time-out is an
        error."""
        patience = settings().timeout + _GRACE_SECONDS
        started = time.monotonic()
        while not operation.done.wait(min(patience, 5.0)):
            if time.monotonic() - max(self._last_news, started) > patience:
                raise CommError(
                    f"{operation.name}: nothing was heard from rank 0 for {patience:g} s (COMMSCHED_TIMEOUT "
                    "and 10 s more); its process hangs or its host is gone"
                )
        if operation.error is not None:
            raise operation.error
        return operation.result

    def join(self, device: torch.device) -> int:
        """Takes part with zeros on `device` from now on, until every rank has joined; the last one's rank."""
        if self._alone:
            return 0
        self._check_process("join")
        operation = Operation("join", "join", 0)
        self._executor.joined_on = device
        example = torch.empty(0, device=device)
        where = device_name((example,), self._meeting.launch.node)
        with self._lock:
            self._announce(operation, {"type": "join", "device": where})
            self._join = operation
        while not operation.done.wait(5.0):
            pass  # the coordinator watches the time-out; its death ends the listener, which ends this
        if operation.error is not None:
            raise operation.error
        return int(operation.result)

    def close(self) -> None:
        """Leave: finish what runs, tell the coordinator, stop the threads."""
        if os.getpid() != self._process:
            return  # a forked child has no part in the job that it could leave
        if self._alone:
            self._stop_timeline()
            return
        self._leaving = True
        self._queue.put(None)
        deadline = time.monotonic() + settings().timeout
        while self._threads[1].is_alive() and not self._broken and time.monotonic() < deadline:
            self._threads[1].join(0.1)
        if self._threads[1].is_alive():
            # A Python thread that comes back from C++ while the interpreter ends aborts the process.
            self._executor.abort()
            self._threads[1].join(_GRACE_SECONDS)
        with suppress(CommError):  # nobody may be left to tell
            self._tell({"type": "bye"})
        self._threads[0].join(_CLOSING_SECONDS)
        if self._coordinator is not None:
            self._coordinator.join(_CLOSING_SECONDS)
        self._fail_all(_SHUT_DOWN)
        self._line.close()
        self._executor.close()
        self._stop_timeline()

    def _stop_timeline(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None

    # -- the listening thread --------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._line.receive())
        except HostLost as error:
            self._without_rank_0 = f"rank 0 is lost, and with it the coordinator of the job: its {error}"
            self._line.interrupt()  # a thread that sends holds the lock
        except (OSError, EOFError):
            pass
        self._fail_all(_SHUT_DOWN if self._leaving else self._without_rank_0)
        if not self._leaving and not self._rank_0_left:
            failure_monitor.report(0, self._without_rank_0)

    def _hear(self, message: Message) -> None:
        self._last_news = time.monotonic()
        kind = message["type"]
        if kind == "run":
            self._queue.put(message)
        elif kind == "error":
            with self._lock:
                operation = self._pending.pop((message["set"], message["name"]), None)
            if operation is not None:
                operation.finish(error=CommError(message["message"]))
        elif kind in ("joined", "join_failed"):
            self._end_join(message)
        elif kind == "lost":
            self._fail_all(message["message"])
            if message["rank"] is not None:
                failure_monitor.report(message["rank"], message["message"])
        elif kind == "farewell":
            self._without_rank_0, self._rank_0_left = message["message"], True

    def _end_join(self, message: Message) -> None:
        with self._lock:
            operation, self._join = self._join, None
        if operation is not None:
            error = CommError(message["message"]) if "message" in message else None
            operation.finish(result=message.get("last"), error=error)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            reason = self._broken = self._broken or reason
            waiting = list(self._pending.values()) + ([self._join] if self._join else [])
            self._pending.clear()
            self._join = None
        self._verdict.set()
        for operation in waiting:
            own = reason.startswith(f"{operation.name} failed")
            told = reason if own else f"{operation.name} failed: {reason}"
            error = CommError(told)
            error.__cause__ = operation.problem
            operation.finish(error=error)

    # -- the running thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if message is None:
                return
            with self._lock:
                operation = self._pending.get((message["set"], message["name"]))
            if operation is None and not message["joined"]:
                continue  # failed meanwhile
            self._execute(operation, message)

    def _execute(self, operation: Operation | None, message: Message) -> None:
        started = time.monotonic()
        result, error = None, None
        try:
            result = self._executor.run(operation, message)
        except Exception as problem:
            error = CommError(
                f"{message['request']['name']} failed on rank {self._meeting.launch.rank}: {problem}"
            )
            error.__cause__ = problem
            if operation is not None:
                operation.problem = problem
            self._report(str(error))
        self._last_news = time.monotonic()
        if operation is None:
            return
        with self._lock:
            self._pending.pop(operation.key, None)
        if self.timeline is not None:
            self.timeline.operation(
                operation.name, operation.kind, operation.submitted, started, time.monotonic()
            )
        operation.finish(result, error)

    def _report(self, reason: str) -> None:
        """After a half-done collective the ranks' streams of bytes no longer match: stop them all.

        Often it broke off because another rank ended, and what ended first, only rank 0 can tell.
        """
        if self._alone:
            return
        if not self._broken:
            with self._lock, suppress(CommError):  # where rank 0 is gone, every rank stops anyway
                self._tell({"type": "failed", "message": reason})
            if not self._leaving:
                self._verdict.wait(_GRACE_SECONDS)
        self._fail_all(reason)
