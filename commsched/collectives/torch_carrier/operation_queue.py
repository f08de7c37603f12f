"""Submits this rank's operations to rank 0's coordinator and runs them in the order that it decides.

Two threads: the listener reads the coordinator's messages, the runner runs operations one by one.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from commsched.collectives.torch_carrier.coordinator import HostLost, connect, send
from commsched.collectives.torch_carrier.negotiation import Key, Message, Negotiator
from commsched.collectives.torch_carrier.operation_runner import Operation, OperationRunner
from commsched.collectives.torch_carrier.timeline import Timeline
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.groups import device_name
from commsched.process.rendezvous import Meeting

_CLOSING_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_SHUT_DOWN = "commsched was shut down before the operation ran"


class OperationQueue:
    """This rank's operations between submission and result. A job of one rank runs them while submitting."""

    def __init__(self, meeting: Meeting, process_sets: dict[int, list[int]]) -> None:
        self.timeline: Timeline | None = None
        self._meeting, self._runner = meeting, OperationRunner(meeting, process_sets)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pending: dict[Key, Operation] = {}
        self._broken: str | None = None
        self._broken_known = threading.Event()  # set once `_broken` is
        self._without_rank_0 = "rank 0 is gone: its process ended, and with it the coordinator of the job"
        self._rank_0_left = False
        self._leaving = False
        # Kept until a call has taken its result: a call that raised an error leaves it to the next one.
        self._join: Operation | None = None
        self._last_news = time.monotonic()
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._alone = meeting.launch.size == 1
        if self._alone:
            self._negotiator = Negotiator(1, settings().timeout, time.monotonic)
            return
        self._connection, self._coordinator = connect(meeting)
        self._listener = threading.Thread(target=self._listen, name="commsched-listener", daemon=True)
        self._running = threading.Thread(target=self._run, name="commsched-runner", daemon=True)
        self._listener.start()
        self._running.start()

    # -- the calling thread

    def submit(self, operation: Operation) -> None:
        """Announce an operation, which runs when all ranks have; ``ValueError`` if its name is in use."""
        self._check_process(operation.name)
        operation.submitted = time.monotonic()
        if operation.tensors and operation.tensors[0].is_cuda:
            # The caller's stream may still be computing the tensors: the runner waits for this event on it.
            stream = torch.cuda.current_stream(operation.tensors[0].device)
            operation.ready = stream, stream.record_event()
        if self._alone:
            for _, message in self._negotiator.submit(0, operation.request(self._meeting.launch.node)):
                if message["type"] == "error":
                    operation.finish(error=CommError(message["message"]))
                else:
                    self._execute(operation, message)
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
        """Raise ``CommError`` in a forked child. Takes no lock: a thread may have held it during the fork."""
        if os.getpid() != self._process:
            raise CommError(
                f"{what} can not run: this process was forked from rank {self._meeting.launch.rank}, and "
                "only the process that called init() has a part in the job; call it there"
            )

    def _announce(self, operation: Operation, message: Message) -> None:
        """Send a message, under the lock. Errors read as if the job had broken while the operation waited."""
        try:
            if self._broken:
                raise CommError(self._broken)
            self._tell(message)
        except CommError as error:
            raise CommError(f"{operation.name} failed: {error}") from error

    def _tell(self, message: Message) -> None:
        try:
            send(self._connection.messages, message)
        except OSError as error:
            raise CommError(self._broken or self._without_rank_0) from error

    def wait(self, operation: Operation) -> Any:
        """Wait for the operation's result; ``CommError`` if rank 0 is silent for longer than the time-out."""
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

    def start_join(self, device: torch.device) -> Operation:
        """Contribute zeros on `device` until every rank has joined; the result is the last one's rank."""
        operation = Operation("join", "join", 0)
        if self._alone:
            operation.finish(result=0)
            return operation
        self._check_process("join")
        with self._lock:
            if self._join is not None and self._join.error is None:
                return self._join
        self._runner.joined_on = device
        example = torch.empty(0, dtype=torch.uint8, device=device)
        where = device_name((example,), self._meeting.launch.node)
        with self._lock:
            self._announce(operation, {"type": "join", "device": where})
            self._join = operation
        return operation

    def wait_for_join(self, operation: Operation) -> int:
        while not operation.done.wait(5.0):
            pass  # the coordinator enforces the time-out; if it dies, the listener fails this operation
        self._join = None
        if operation.error is not None:
            raise operation.error
        return int(operation.result)

    def report_progress(self) -> None:
        if not self._alone:
            self._tell({"type": "progress"})

    def close(self) -> None:
        """Leave the job: finish the running operation, tell the coordinator, stop the threads."""
        if os.getpid() != self._process:
            return  # a forked child is not part of the job
        if self._alone:
            self.stop_timeline()
            return
        self._leaving = True
        self._queue.put(None)
        deadline = time.monotonic() + settings().timeout
        while self._running.is_alive() and not self._broken and time.monotonic() < deadline:
            self._running.join(0.1)
        if self._running.is_alive():
            # A Python thread that returns from C++ while the interpreter ends aborts the process.
            self._runner.abort(_SHUT_DOWN)
            self._running.join(_GRACE_SECONDS)
        with suppress(CommError):  # rank 0 may have ended
            self._tell({"type": "bye"})
        self._listener.join(_CLOSING_SECONDS)
        if self._coordinator is not None:
            self._coordinator.join(_CLOSING_SECONDS)
        self._fail_all(_SHUT_DOWN)
        self._connection.close()
        self._runner.close()
        self.stop_timeline()

    def stop_timeline(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    # -- the listening thread

    def _listen(self) -> None:
        try:
            while True:
                self._handle(self._connection.receive())
        except HostLost as error:
            self._without_rank_0 = f"rank 0 is lost, and with it the coordinator of the job: its {error}"
            self._connection.interrupt()  # a sending thread holds the lock that _fail_all needs
        except (OSError, EOFError):
            pass
        self._fail_all(_SHUT_DOWN if self._leaving else self._without_rank_0)
        if not self._leaving and not self._rank_0_left:
            failure_monitor.report(0, self._without_rank_0)

    def _handle(self, message: Message) -> None:
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
            with self._lock:
                operation = self._join
            if operation is not None:
                error = CommError(message["message"]) if "message" in message else None
                operation.finish(result=message.get("last"), error=error)
        elif kind == "lost":
            self._fail_all(message["message"])
            if message["rank"] is not None:
                failure_monitor.report(message["rank"], message["message"])
        elif kind == "waits":
            print(f"commsched: rank {self._meeting.launch.rank}: {message['message']}", file=sys.stderr)
        elif kind == "farewell":
            self._without_rank_0, self._rank_0_left = message["message"], True

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            reason = self._broken = self._broken or reason
            waiting = list(self._pending.values())
            if self._join is not None and not self._join.done.is_set():
                waiting.append(self._join)
            self._pending.clear()
        self._broken_known.set()
        for operation in waiting:
            named = reason.startswith(f"{operation.name} failed")
            error = CommError(reason if named else f"{operation.name} failed: {reason}")
            error.__cause__ = operation.cause
            operation.finish(error=error)

    # -- the running thread

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if message is None:
                return
            with self._lock:
                operation = self._pending.get((message["set"], message["name"]))
            if operation is None and not message["joined"]:
                continue  # it has failed in the meantime
            self._execute(operation, message)

    def _execute(self, operation: Operation | None, message: Message) -> None:
        started = time.monotonic()
        result, error = None, None
        try:
            result = self._runner.run(operation, message)
        except Exception as cause:
            error = CommError(
                f"{message['request']['name']} failed on rank {self._meeting.launch.rank}: {cause}"
            )
            error.__cause__ = cause
            if operation is not None:
                operation.cause = cause
            self._stop_all_ranks(str(error))
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

    def _stop_all_ranks(self, reason: str) -> None:
        """Fail all operations on all ranks: after a half-done collective their streams of bytes do not match.

        Often it failed because another rank ended. Only rank 0 knows which rank ended first, so wait for it.
        """
        if self._alone:
            return
        if not self._broken:
            with self._lock, suppress(CommError):  # without rank 0 every rank stops anyway
                self._tell({"type": "failed", "message": reason})
            if not self._leaving:
                self._broken_known.wait(_GRACE_SECONDS)
        self._fail_all(reason)
