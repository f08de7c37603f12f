"""This rank's operations, from submission to result.

``OperationQueue`` submits them to rank 0's coordinator and runs them in the order that it decides. Three
threads: the sender sends requests for which nobody waits yet, the listener reads the coordinator's messages,
the runner runs operations one by one, or several all-reduces as one. ``OperationRunner`` carries them out,
over NCCL, or over a channel to which GPU tensors are copied. ``Timeline`` records them.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier import algorithms
from commsched.collectives.torch_carrier.algorithms import ChannelGroup, NcclGroup, RankGroup
from commsched.collectives.torch_carrier.coordinator import HostLost, Key, Message, Negotiator, connect, send
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.groups import device_name, messages_between, nccl_group, nccl_usable
from commsched.process.rendezvous import Meeting

_CLOSING_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_SHUT_DOWN = "commsched was shut down before the operation ran"
# A request waits so long for others that can travel with it, unless a thread waits for its result.
_LINGER_SECONDS = 0.0005
_KNOWN_REQUESTS = 1024


class OperationQueue:
    """This rank's operations between submission and result. A job of one rank runs them while submitting."""

    def __init__(self, meeting: Meeting, process_sets: dict[int, list[int]]) -> None:
        self.timeline: Timeline | None = None
        self._meeting, self._runner = meeting, OperationRunner(meeting, process_sets)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pending: dict[Key, Operation] = {}
        self._known = KnownRequests(meeting.launch.node)
        self._unsent: list[str] = []
        self._unsent_known = threading.Event()  # set when `_unsent` gets its first message
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
        self._sender = threading.Thread(target=self._send_soon, name="commsched-sender", daemon=True)
        for thread in (self._listener, self._running, self._sender):
            thread.start()

    # -- the calling thread

    def submit(self, operation: Operation) -> None:
        """Announce an operation, which runs when all ranks have; ``ValueError`` if its name is in use.

        Its request leaves when a thread waits for the result or asks for it, else a little later, so that the
        requests of operations that are started together travel together.
        """
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
                    self._execute([operation], message)
            return
        with self._lock:
            key = operation.key
            if key in self._pending:
                raise ValueError(
                    f"an operation named {operation.name!r} has not ended yet; wait for it with "
                    "synchronize(), or give this one another name"
                )
            self._check_broken(operation)
            if not self._unsent:
                self._unsent_known.set()
            self._unsent.append(self._known.text(operation))
            self._pending[key] = operation

    def _check_process(self, what: str) -> None:
        """Raise ``CommError`` in a forked child. Takes no lock: a thread may have held it during the fork."""
        if os.getpid() != self._process:
            raise CommError(
                f"{what} can not run: this process was forked from rank {self._meeting.launch.rank}, and "
                "only the process that called init() has a part in the job; call it there"
            )

    def _check_broken(self, operation: Operation) -> None:
        """Raise, under the lock, the error of an operation that waited when the job broke."""
        if self._broken:
            raise CommError(f"{operation.name} failed: {self._broken}")

    def _tell(self, message: Message) -> None:
        """Send a message and all requests before it, under the lock."""
        self._unsent.append(json.dumps(message))
        try:
            self._send()
        except OSError as error:
            raise CommError(self._broken or self._without_rank_0) from error

    def _send(self) -> None:
        """Send what waits, under the lock: no number may leave before the request that it stands for."""
        texts, self._unsent = self._unsent, []
        if texts:
            send(self._connection.messages, texts)

    def _flush(self) -> None:
        if self._unsent and os.getpid() == self._process:
            with self._lock, suppress(OSError):  # without rank 0 the listener fails all operations
                self._send()

    def has_ended(self, operation: Operation) -> bool:
        if not operation.ended:
            self._flush()
        return operation.ended

    def wait(self, operation: Operation) -> Any:
        """Wait for the operation's result; ``CommError`` if rank 0 is silent for longer than the time-out."""
        if not self.has_ended(operation):
            self._wait(operation)
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _wait(self, operation: Operation) -> None:
        patience = settings().timeout + _GRACE_SECONDS
        started = time.monotonic()
        while not operation.wait(min(patience, 5.0)):
            if time.monotonic() - max(self._last_news, started) > patience:
                raise CommError(
                    f"{operation.name}: nothing was heard from rank 0 for {patience:g} s (COMMSCHED_TIMEOUT "
                    "and 10 s more); its process hangs or its host is gone"
                )

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
            self._check_broken(operation)
            try:
                self._tell({"type": "join", "device": where})
            except CommError as error:
                raise CommError(f"join failed: {error}") from error
            self._join = operation
        return operation

    def wait_for_join(self, operation: Operation) -> int:
        while not operation.wait(5.0):
            pass  # the coordinator enforces the time-out; if it dies, the listener fails this operation
        self._join = None
        if operation.error is not None:
            raise operation.error
        return int(operation.result)

    def report_progress(self, doing: str) -> None:
        if not self._alone:
            with self._lock:
                self._tell({"type": "progress", "doing": doing})

    def close(self, error: str) -> None:
        """Leave the job: finish the running operation, tell the coordinator why, stop the threads."""
        if os.getpid() != self._process:
            return  # a forked child is not part of the job
        if self._alone:
            self.stop_timeline()
            return
        self._leaving = True
        self._flush()
        self._unsent_known.set()  # the sender ends
        self._queue.put(None)
        # After an error of the script (Ctrl-C in a wait) nobody knows whether the others still take part.
        deadline = time.monotonic() + (_GRACE_SECONDS if error else settings().timeout)
        while self._running.is_alive() and not self._broken and time.monotonic() < deadline:
            self._running.join(0.1)
        if self._running.is_alive():
            # A Python thread that returns from C++ while the interpreter ends aborts the process.
            self._runner.abort(_SHUT_DOWN)
            self._running.join(_GRACE_SECONDS)
        with self._lock, suppress(CommError):  # rank 0 may have ended
            self._tell({"type": "bye", "error": error})
        self._sender.join(_CLOSING_SECONDS)
        self._listener.join(_CLOSING_SECONDS)
        if self._coordinator is not None:
            self._coordinator.join(_CLOSING_SECONDS)
        self._fail_all(_SHUT_DOWN)
        self._connection.close()
        self._listener.join(_GRACE_SECONDS)  # or it would tell the next job what it has heard of this one
        self._runner.close()
        self.stop_timeline()

    def stop_timeline(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    # -- the sending thread

    def _send_soon(self) -> None:
        while self._unsent_known.wait() and not self._leaving:
            self._unsent_known.clear()  # first: what comes after an empty list sets it again
            time.sleep(_LINGER_SECONDS)
            self._flush()

    # -- the listening thread

    def _listen(self) -> None:
        try:
            while True:
                for message in self._connection.receive():
                    self._handle(message)
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
            if message["rank"] is not None and not self._leaving:  # else the next job may have begun
                failure_monitor.report(message["rank"], message["message"])
        elif kind == "waits":
            print(f"commsched: rank {self._meeting.launch.rank}: {message['message']}", file=sys.stderr)
        elif kind == "left":
            for rank, reason in message["ranks"]:
                failure_monitor.note_left(rank, reason)
                if rank == 0:
                    self._without_rank_0, self._rank_0_left = reason, True

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            reason = self._broken = self._broken or reason
            waiting = list(self._pending.values())
            if self._join is not None and not self._join.ended:
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
            joined = self._meeting.launch.rank in message["joined"]
            with self._lock:
                keys = [] if joined else [(message["set"], name) for name in message["names"]]
                operations = [self._pending[key] for key in keys if key in self._pending]
            if len(operations) == len(keys):  # else they have failed in the meantime, all of them
                self._execute(operations, message)

    def _execute(self, operations: Sequence[Operation], message: Message) -> None:
        """Run one operation, or all-reduces as one; none on a rank that has joined and gives zeros."""
        started = time.monotonic()
        results: Sequence[Any] = ()
        failed = ""
        cause: Exception | None = None
        try:
            results = self._runner.run(operations, message)
        except Exception as error:
            failed, cause = f"failed on rank {self._meeting.launch.rank}: {error}", error
            for operation in operations:
                operation.cause = cause
            self._stop_all_ranks(f"{message['names'][0]} {failed}")
        self._last_news = ended = time.monotonic()
        with self._lock:
            for operation in operations:
                self._pending.pop(operation.key, None)
        for i, operation in enumerate(operations):
            if self.timeline is not None:
                self.timeline.operation(operation.name, operation.kind, operation.submitted, started, ended)
            if cause is None:
                operation.finish(results[i])
            else:
                failure = CommError(f"{operation.name} {failed}")
                failure.__cause__ = cause
                operation.finish(error=failure)

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


# -- running one operation -----------------------------------------------------------------------------------


_some_end = threading.Condition()  # one for all operations: to make one for each took a tenth of the time


@dataclass(slots=True)
class Operation:
    """A collective, a barrier or a change of process sets, and once `done` its result or its error."""

    kind: str
    name: str
    set_id: int
    tensors: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    grouped: bool = False
    reduction: Reduction | None = None
    root: int = -1
    splits: list[int] | None = None
    received_splits: torch.Tensor | None = None  # an alltoall's second result has its type and device
    ranks: list[int] | None = None  # add_process_set: the members; remove_process_set: the set's id
    submitted: float = 0.0
    ready: Any = None  # the caller's CUDA stream and an event on it
    result: Any = None
    error: CommError | None = None
    cause: Exception | None = None
    ended: bool = False

    @property
    def key(self) -> Key:
        return self.set_id, self.name

    def request(self, node: str) -> Message:
        """Return what the coordinator and the other ranks need to know."""
        message: Message = {
            "type": "request",
            "kind": self.kind,
            "name": self.name,
            "set": self.set_id,
            "dtypes": [str(t.dtype) for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
            "device": device_name(self.tensors, node),
            "root": self.root,
            "splits": self.splits,
            "ranks": self.ranks,
            "bytes": sum(tensor.nbytes for tensor in self.tensors),
        }
        if self.reduction is not None:
            message["op"] = int(self.reduction.op)
            message["prescale"] = self.reduction.prescale
            message["postscale"] = self.reduction.postscale
        return message

    def finish(self, result: Any = None, error: CommError | None = None) -> None:
        """Set the result or the error, unless the operation has ended already."""
        with _some_end:
            if not self.ended:
                self.result, self.error, self.ended = result, error, True
                _some_end.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, and return whether the operation has ended."""
        with _some_end:
            return _some_end.wait_for(lambda: self.ended, seconds)


class KnownRequests:
    """Writes this rank's requests for the coordinator: a request that it has sent before as its number alone.

    The coordinator keeps a request until another one gets its number. Ranks may give different numbers to one
    operation.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._numbers: dict[Any, str] = {}  # by what makes a request

    def text(self, operation: Operation) -> str:
        if operation.splits is not None or operation.ranks is not None:
            return json.dumps(operation.request(self._node))
        what = (
            *(operation.name, operation.set_id, operation.kind, operation.root, operation.reduction),
            *[(tensor.dtype, tensor.shape, tensor.device) for tensor in operation.tensors],
        )
        number = self._numbers.get(what)
        if number is not None:
            return number
        number = str(len(self._numbers))
        if len(self._numbers) == _KNOWN_REQUESTS:
            number = self._numbers.pop(next(iter(self._numbers)))  # the oldest one's
        self._numbers[what] = number
        return json.dumps({**operation.request(self._node), "number": int(number)})


class OperationRunner:
    """Runs operations and owns the groups of the process sets. Used by one thread; ``abort`` by any.

    `process_sets` holds every set's ranks by its id; operations that add and remove sets change it.
    """

    def __init__(self, meeting: Meeting, process_sets: dict[int, list[int]]) -> None:
        self._meeting, self._sets = meeting, process_sets
        self._groups: dict[tuple[int, str], RankGroup] = {}
        self.joined_on = torch.device("cpu")  # after join(), this rank's zeros are on this device

    @torch.no_grad()  # ``collectives.operations`` computes gradients
    def run(self, operations: Sequence[Operation], message: Message) -> Sequence[Any]:
        """Run one operation, or several all-reduces as one, and return the result of each.

        There are none on a rank that has joined: it gives zeros.
        """
        kind = operations[0].kind if operations else message["requests"][0]["kind"]
        if kind in ("add_process_set", "remove_process_set"):
            ranks = operations[0].ranks or []
            if kind == "remove_process_set":
                self._remove_set(ranks[0])
            elif message["new_set"] is not None:
                self._sets[message["new_set"]] = ranks
            return [message]
        if kind == "barrier":
            return [None]  # it runs once every rank has called it: nothing is left to do
        operations = operations or [self._zeros(request) for request in message["requests"]]
        if len(operations) == 1:
            return [self._run_one(operations[0], message)]
        tensors = tuple(tensor for operation in operations for tensor in operation.tensors)
        outputs = tuple(output for operation in operations for output in operation.outputs)
        self._run_one(replace(operations[0], tensors=tensors, outputs=outputs, grouped=True), message)
        return [_one_or_all(operation, operation.outputs) for operation in operations]

    def _run_one(self, operation: Operation, message: Message) -> Any:
        # A joined rank's zeros may be on the CPU. Its device name then says so: all ranks use the CPU.
        if operation.tensors[0].device.type == "cpu":
            return self._run_in(self._group(operation.set_id, "cpu"), operation, message)
        return self._run_on_gpu(operation, message)

    def _remove_set(self, set_id: int) -> None:
        self._sets.pop(set_id, None)
        for key in [key for key in self._groups if key[0] == set_id]:
            self._groups.pop(key).close()

    def _zeros(self, request: Message) -> Operation:
        device = torch.device("cpu") if request["device"] == "cpu" else self.joined_on
        tensors = tuple(
            torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for shape, dtype in zip(request["shapes"], request["dtypes"], strict=True)
        )
        reduction = Reduction(ReduceOp(request["op"]), request["prescale"], request["postscale"])
        return Operation(
            request["kind"], request["name"], request["set"], tensors, tensors, reduction=reduction
        )

    def _group(self, set_id: int, kind: str) -> RankGroup:
        """Return the process set's group of this kind, "cpu" or "nccl"; its first use connects the ranks."""
        if (set_id, kind) not in self._groups:
            members, meeting = self._sets[set_id], self._meeting
            name, place = f"collectives/{set_id}/{kind}", members.index(meeting.launch.rank)
            group: RankGroup
            if kind == "cpu":
                channel = messages_between(meeting, name, members, settings().timeout)
                group = ChannelGroup(channel, place, len(members))
            else:
                group = NcclGroup(nccl_group(meeting.store, name, place, members))
            self._groups[set_id, kind] = group
        return self._groups[set_id, kind]

    def _run_on_gpu(self, operation: Operation, message: Message) -> Any:
        """Use NCCL if every rank has a GPU of its own, else the CPU."""
        device, set_id, names = operation.tensors[0].device, operation.set_id, message["devices"]
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            stream = torch.cuda.current_stream(device)
            if operation.ready is not None:
                stream.wait_event(operation.ready[1])
            if len(names) == 1:  # one rank: nothing leaves this GPU
                result = self._run_in(self._group(set_id, "cpu"), operation, message)
            elif nccl_usable(names):
                result = self._run_in(self._group(set_id, "nccl"), operation, message)
            else:
                result = self._run_through_cpu(operation, message)
            stream.synchronize()
        if operation.ready is not None:
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.is_cuda:  # allocated on our stream, used on the caller's
                    tensor.record_stream(operation.ready[0])
        return result

    def _run_through_cpu(self, operation: Operation, message: Message) -> Any:
        staged = replace(
            operation,
            tensors=tuple(t.cpu() for t in operation.tensors),
            outputs=tuple(t.cpu() for t in operation.outputs),
        )
        result = self._run_in(self._group(operation.set_id, "cpu"), staged, message)
        if operation.outputs:
            for target, source in zip(operation.outputs, staged.outputs, strict=True):
                target.copy_(source)
            return _one_or_all(operation, operation.outputs)
        device = operation.tensors[0].device
        if operation.kind == "alltoall":  # the received splits stay on the splits' device
            return result[0].to(device), result[1]
        if operation.grouped:
            return tuple(part.to(device) for part in result)
        return result.to(device)

    def _run_in(self, group: RankGroup, operation: Operation, message: Message) -> Any:
        """Run one of the five collectives among the ranks of `group`."""
        # Tensors of the caller's inference mode cannot be written outside of it, and it ends at his thread.
        inference = any(target.is_inference() for target in operation.outputs)
        with torch.inference_mode() if inference else nullcontext():
            return self._collective(group, operation, message)

    def _collective(self, group: RankGroup, operation: Operation, message: Message) -> Any:
        tensors, outputs, reduction = operation.tensors, operation.outputs, operation.reduction
        if operation.kind == "broadcast":
            root = self._sets[operation.set_id].index(operation.root)
            algorithms.broadcast(group, tensors[0], outputs[0], root)
            return outputs[0]
        if operation.kind == "alltoall":
            return _alltoall(group, operation, message["splits"])
        if operation.kind == "allgather":
            rows = message["rows"]
            results = [
                algorithms.allgather(group, t, [row[i] for row in rows]) for i, t in enumerate(tensors)
            ]
            return _one_or_all(operation, results)
        assert reduction is not None
        if operation.kind == "allreduce":
            algorithms.allreduce(group, tensors, outputs, reduction)
            return _one_or_all(operation, outputs)
        return _one_or_all(operation, [algorithms.reducescatter(group, t, reduction) for t in tensors])

    def abort(self, reason: str) -> None:
        """End the running collective, from another thread: a rank that it waits for has died."""
        for group in list(self._groups.values()):
            group.abort(reason)

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()


def _one_or_all(operation: Operation, results: Sequence[torch.Tensor]) -> Any:
    return tuple(results) if operation.grouped else results[0]


def _alltoall(group: RankGroup, operation: Operation, splits: list[list[int]]) -> Any:
    assert operation.received_splits is not None
    tensor = operation.tensors[0][: sum(splits[group.rank])]
    result, received = algorithms.alltoall(group, tensor, splits)
    like = operation.received_splits
    return result, torch.tensor(received, dtype=like.dtype, device=like.device)


class Timeline:
    """Records this rank's operations for chrome://tracing, with the event names of Horovod's timeline.

    Collects events and writes them as one JSON list when closed. Makes the file at once, so that a path that
    cannot be written is an error before the recording.
    """

    def __init__(self, path: str, rank: int, mark_cycles: bool) -> None:
        self._path, self._rank, self._mark_cycles = Path(path), rank, mark_cycles
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._lanes: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._add("process_name", "M", args={"name": f"rank {rank}"})
        self._add("clock", "M", args={"start_time_since_epoch_in_micros": int(time.time() * 1e6)})

    def operation(self, name: str, kind: str, submitted: float, started: float, ended: float) -> None:
        """Record one finished operation: its wait for the other ranks, then its run.

        Times are ``time.monotonic()``. Operations submitted before the recording began are cut at its start.
        """
        with self._lock:
            lane = self._lane(name)
            for label, begin, end in (
                (f"NEGOTIATE_{kind.upper()}", max(submitted, self._start), started),
                (kind.upper(), max(started, self._start), ended),
            ):
                duration = max(0.0, round((end - begin) * 1e6, 3))
                self._add(label, "X", tid=lane, ts=self._micros(begin), dur=duration)
            if self._mark_cycles:
                self._add("CYCLE_START", "i", ts=self._micros(started), s="p")

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._add("thread_name", "M", tid=self._lanes[name], args={"name": name})
        return self._lanes[name]

    def _add(self, name: str, phase: str, **more: Any) -> None:
        self._events.append({"name": name, "ph": phase, "pid": self._rank, **more})

    def _micros(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 3)

    def close(self) -> None:
        """Write the file."""
        with self._lock:
            self._path.write_text(json.dumps(self._events, indent=0))
