"""Rank 0's coordinator decides which operation all ranks run next.

Each rank sends its requests over TCP to the ``Coordinator``, a thread of rank 0. The ``Negotiator`` keeps its
state, ``disagreement`` compares the ranks' requests for one operation, and ``fused`` joins small all-reduces
into one run; none of them uses sockets or tensors.

What travels is a JSON list of messages, for requests and answers that became ready together. A request that
the rank has sent before is the number that it had given to it.

Each rank has two connections. The one for messages breaks at once when the rank dies, whatever it was doing.
The other one carries no messages and shows by keepalives that the rank's host still answers.
"""

from __future__ import annotations

import json
import math
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from comm_core import Host, TcpConnection, close_in_children, tcp_connections
from commsched.collectives.carrier import ReduceOp
from commsched.env import fusion_threshold, settings
from commsched.errors import CommError

if TYPE_CHECKING:
    from commsched.process.rendezvous import Meeting

Message = dict[str, Any]
Reply = tuple[list[int], Message]  # the ranks that get the message
Key = tuple[int, str]  # an operation's process set and name


_LONGEST_POLL = 86400.0  # seconds; poll() takes less than 25 days, and a time-out may be longer


class HostLost(OSError):
    """The other end's host does not answer; its process may still run."""


class RankConnection:
    """One end of the two connections between a rank and the coordinator.

    The keepalive connection carries no messages: unread bytes would hide whether the other host still
    answers. Rank 0 needs none to its own coordinator.
    """

    def __init__(self, messages: Connection, host: Host | None = None) -> None:
        self.messages, self._host = close_in_children(messages), host
        self.keepalive: socket.socket | None = host.keepalive if host else None
        self.descriptors = [end.fileno() for end in (self.messages, self.keepalive) if end is not None]
        self._readable = readable(self.descriptors)
        self._reading = threading.Lock()  # held by receive(): see close()

    @classmethod
    def over(cls, connection: TcpConnection) -> RankConnection:
        return cls(Connection(connection.data.detach()), connection.host)

    def receive(self) -> Any:
        """Wait for the next messages; ``EOFError`` or ``OSError`` if the other process or this end ended."""
        with self._reading:
            while True:
                messages = self.messages.fileno()  # an error if closed: its number may be another file's
                ready = [descriptor for descriptor, _ in self._readable.poll()]
                if messages in ready:
                    return receive(self.messages)
                self.check_host()
                self._readable.unregister(ready[0])

    def check_host(self) -> None:
        """Raise ``HostLost`` if the host does not answer. Call once, when `keepalive` is readable.

        Returns if the other process has ended instead: then `messages` ends, too.
        """
        if self._host is not None and (lost := self._host.lost()):
            raise HostLost(lost)

    def interrupt(self) -> None:
        """End the sends and reads of other threads with an error."""
        with suppress(OSError):
            handle = socket.socket(fileno=self.messages.fileno())
            try:
                handle.shutdown(socket.SHUT_RDWR)
            finally:
                handle.detach()

    def close(self) -> None:
        """End reads, and close once they have ended: their descriptor's number is given to the next file.

        A read that waits does not notice that its descriptor is closed, and would go on with that file.
        """
        self.interrupt()
        with self._reading:
            self.messages.close()
            if self.keepalive is not None:
                self.keepalive.close()


def connect(meeting: Meeting) -> tuple[RankConnection, Coordinator | None]:
    """Connect this rank to the coordinator; rank 0 starts the coordinator and gets it, too."""
    rank, size, patience = meeting.launch.rank, meeting.launch.size, meeting.patience
    threshold = fusion_threshold()  # rank 0's counts; a wrong one is an error of every rank that has it
    store = PrefixStore("coordinator", meeting.store)
    try:
        connections = tcp_connections(
            store, rank, size, meeting.address, patience, settings().host_timeout, star=True
        )
    except RuntimeError as error:  # also the store's own errors
        raise CommError(
            f"rank {rank} can not connect to rank 0's coordinator from {meeting.address}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    others = [RankConnection.over(one) for one in connections if one is not None]
    if rank != 0:
        return others[0], None
    mine, own = Pipe()
    ends = [RankConnection(own), *others]
    coordinator = Coordinator(ends, settings().timeout, settings().warning, threshold)
    coordinator.start()
    return RankConnection(mine), coordinator


def readable(descriptors: Sequence[int]) -> select.poll:
    """Return what waits until one of the descriptors can be read."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def send(connection: Connection, texts: Sequence[str]) -> None:
    """Send messages, each of them JSON, as one."""
    connection.send_bytes(f"[{','.join(texts)}]".encode())


def receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


class Coordinator(threading.Thread):
    """Passes every rank's messages to the negotiator and its replies to the ranks, until all have left."""

    def __init__(
        self,
        connections: Sequence[RankConnection],
        timeout: float,
        warning: float = math.inf,
        fusion_threshold: int = 0,
    ) -> None:
        super().__init__(name="commsched-coordinator", daemon=True)
        self._size, self._fusion_threshold = len(connections), fusion_threshold
        self._negotiator = Negotiator(self._size, timeout, time.monotonic, warning)
        self._connections = dict(enumerate(connections))
        self._dropped: list[RankConnection] = []  # not closed yet
        self._known: defaultdict[int, dict[int, Message]] = defaultdict(dict)  # each rank's numbered requests
        self._left: list[tuple[int, str]] = []  # who has left in order, and why, before the others are told
        self._ranks = {end: rank for rank, ends in self._connections.items() for end in ends.descriptors}
        self._readable = readable(list(self._ranks))

    def run(self) -> None:
        try:
            while self._connections:
                self._serve_once()
        finally:
            # After an exception here, too: a rank whose connection closes raises an error instead of waiting.
            for ends in (*self._connections.values(), *self._dropped):
                ends.close()

    def _serve_once(self) -> None:
        """Read what has come from all ranks, and answer it together."""
        deadline = self._negotiator.next_deadline()
        left = None if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL)
        patience = None if left is None else math.ceil(1e3 * left)
        replies: list[Reply] = []
        for descriptor, _ in self._readable.poll(patience):
            rank = self._ranks.get(descriptor)
            if rank is not None:  # None: an earlier connection in this loop has dropped the rank
                replies += self._read(rank, descriptor)
        if self._left:
            # Now: if rank 0 has left, its process, and this thread with it, may end at any moment.
            replies.append((list(self._connections), {"type": "left", "ranks": self._left}))
            self._left = []
        self._send(fused([*replies, *self._negotiator.expire()], self._fusion_threshold))
        while self._dropped:
            self._dropped.pop().close()

    def _read(self, rank: int, descriptor: int) -> list[Reply]:
        ends = self._connections[rank]
        try:
            if descriptor == ends.messages.fileno():
                return [reply for each in receive(ends.messages) for reply in self._handle(rank, each)]
            self._unwatch(descriptor)
            ends.check_host()
            return []
        except HostLost as error:
            return self._drop(rank, f"rank {rank} is lost: its {error}", alarm=True)
        except (OSError, EOFError):
            reason = f"rank {rank} died: its process ended without leaving the job"
            return self._drop(rank, reason, alarm=True)

    def _handle(self, rank: int, message: Message | int) -> list[Reply]:
        if isinstance(message, int):
            return self._negotiator.submit(rank, self._known[rank][message])
        kind = message["type"]
        if kind == "request":
            if "number" in message:
                self._known[rank][message.pop("number")] = message
            return self._negotiator.submit(rank, message)
        if kind == "join":
            return self._negotiator.join(rank, message["device"])
        if kind == "progress":
            self._negotiator.hear(rank, message["doing"])
        elif kind == "failed":
            self._negotiator.fail(message["message"])
        elif kind == "bye":
            error = message["error"]
            cause = f"after {error}" if error else "(its script ended or called shutdown())"
            reason = f"rank {rank} has left the job {cause}"
            self._left.append((rank, reason))
            return self._drop(rank, reason, alarm=False)
        return []

    def _drop(self, rank: int, reason: str, alarm: bool) -> list[Reply]:
        """Take a rank out of the job. Its connection closes once the others have been told."""
        ends = self._connections.pop(rank)
        self._dropped.append(ends)
        for descriptor in ends.descriptors:
            self._unwatch(descriptor)
        return self._negotiator.leave(rank, reason, alarm)

    def _unwatch(self, descriptor: int) -> None:
        if self._ranks.pop(descriptor, None) is not None:
            self._readable.unregister(descriptor)

    def _send(self, replies: Sequence[Reply]) -> None:
        """Send to rank 0 last: once it has the message, its process may end, and this thread with it."""
        texts: defaultdict[int, list[str]] = defaultdict(list)
        for ranks, message in replies:
            text = json.dumps(message)
            for rank in ranks:
                texts[rank].append(text)
        for rank in sorted(texts, key=lambda rank: rank == 0):
            with suppress(OSError):  # the rank has died; reading from its connection reports it
                if rank in self._connections:
                    send(self._connections[rank].messages, texts[rank])


def fused(replies: Sequence[Reply], threshold: int) -> list[Reply]:
    """Join all-reduces that may run as one, up to `threshold` bytes, in the place of the first of them.

    They may if they have the same ranks, reduction and joined ranks, and are on CPUs: there the bits of a sum
    do not depend on an element's place in the buffer. NCCL's do, and what becomes ready together depends
    on the ranks' speed.
    """
    kept: list[Reply] = []
    open_runs: dict[Any, tuple[Message | None, int]] = {}  # by what must be equal: the last run, its bytes
    for ranks, message in replies:
        if message["type"] == "run":
            request = message["requests"][0]
            if not message["joined"]:
                del message["requests"]  # only they need them
            on_cpus = request["kind"] == "allreduce" and request["device"] == "cpu"
            if on_cpus and request["bytes"] <= threshold:
                same = (message["set"], *map(request.get, _FACTORS), *message["joined"])
                run, size = open_runs.get(same, (None, 0))
                if run is not None and size + request["bytes"] <= threshold:
                    for listed in {"names", "requests"} & message.keys():
                        run[listed] += message[listed]
                    open_runs[same] = run, size + request["bytes"]
                    continue
                open_runs[same] = message, request["bytes"]
        kept.append((ranks, message))
    return kept


# -- negotiation ---------------------------------------------------------------------------------------------

# Wait this long for the root cause before reporting a failed operation: ranks often report a broken
# connection before rank 0 notices the death that broke it.
_CAUSE_SECONDS = 5.0


@dataclass
class _Pending:
    since: float
    requests: dict[int, Message] = field(default_factory=dict)
    told: bool = False  # the ranks that wait know for whom


class Negotiator:
    """The state of rank 0's coordinator. `clock` returns seconds; an operation may wait `timeout` seconds.

    Ranks submit requests in any order. A request is complete when every rank of its process set has submitted
    it or has joined. All ranks run operations in the order of completion. After `warning` seconds, the first
    rank that waits is told for whom.
    """

    def __init__(
        self, size: int, timeout: float, clock: Callable[[], float], warning: float = math.inf
    ) -> None:
        self._size, self._timeout, self._clock, self._warning = size, timeout, clock, warning
        self._sets: dict[int, list[int]] = {0: list(range(size))}
        self._next_set = 1
        self._pending: dict[Key, _Pending] = {}
        self._joined: list[int] = []
        self._joined_on: dict[int, str] = {}  # the device of each joined rank's zeros
        self._gone: dict[int, str] = {}  # why each rank that ended did
        self._failure: tuple[float, str] | None = None  # an operation's failure: when, and its message
        self._timed_out: dict[int, str] = {}  # the operation that each rank last waited for in vain
        self._doing: dict[int, str] = {}  # what each rank does until its next operation, if it has told
        self._over = ""  # why all operations fail from now on
        self._last_news = clock()

    def submit(self, rank: int, request: Message) -> list[Reply]:
        """Add one rank's request for an operation."""
        self._last_news = self._clock()
        key = (request["set"], request["name"])
        reason = self._why_impossible(request["set"])
        if reason:
            return [([rank], _error(key, f"{request['name']} can not run: {reason}"))]
        entry = self._pending.get(key)
        if entry is None:
            entry = self._pending[key] = _Pending(self._last_news)
        entry.requests[rank] = request
        self._timed_out.pop(rank, None)
        self._doing.pop(rank, None)
        return self._complete(key)

    def join(self, rank: int, device: str = "cpu") -> list[Reply]:
        """Let a rank contribute zeros on `device` until all ranks have joined."""
        self._last_news = self._clock()
        self._joined.append(rank)
        reason = self._why_impossible(0)
        if reason:
            return self._fail_join(f"join() can not end: {reason}")
        self._joined_on[rank] = device
        replies = [reply for key in list(self._pending) for reply in self._complete(key)]
        if len(self._joined) == self._size:
            replies.append((list(range(self._size)), {"type": "joined", "last": rank}))
            self._joined = []
        return replies

    def hear(self, rank: int, doing: str = "") -> None:
        """Note that ranks that have not joined go on: optimizers exchange gradients without requests."""
        self._last_news = self._clock()
        self._doing[rank] = doing

    def leave(self, rank: int, reason: str, alarm: bool) -> list[Reply]:
        """Fail all operations that wait for a rank that has ended; with `alarm` also the running ones."""
        if rank in self._gone:
            return []
        self._gone[rank] = reason
        replies: list[Reply] = []
        for key, entry in list(self._pending.items()):
            if rank in self._sets[key[0]]:
                del self._pending[key]
                waiting = [r for r in entry.requests if r not in self._gone]
                replies.append((waiting, _error(key, f"{key[1]} can not run: {reason}")))
        if self._joined:
            replies += self._fail_join(f"join() can not end: {reason}")
        if alarm or self._failure:
            replies += self._stop(reason, rank)
        return replies

    def fail(self, message: str) -> None:
        """Note that an operation failed on a rank.

        All ranks get the same reason: the end of another rank if that follows at once, else this `message`.
        """
        if not self._over and not self._failure:
            self._failure = self._clock(), message

    def _stop(self, reason: str, rank: int | None = None) -> list[Reply]:
        """Fail everything on all ranks, for the first reason given; `rank` is the rank that has ended."""
        self._failure = None
        self._over = self._over or reason
        others = [r for r in range(self._size) if r not in self._gone]
        return [(others, {"type": "lost", "message": self._over, "rank": rank})]

    def expire(self) -> list[Reply]:
        """Fail everything that has waited too long."""
        now = self._clock()
        replies: list[Reply] = []
        if self._failure and now - self._failure[0] >= _CAUSE_SECONDS:
            replies += self._stop(self._failure[1])
        for key, entry in self._pending.items():
            if not entry.told and now - entry.since >= self._warning:
                entry.told = True
                text = self._why_late(key, entry, f"{self._warning:g} of {self._timeout:g} s")
                replies.append(([min(entry.requests)], {"type": "waits", "message": text}))
        late = {key: entry for key, entry in self._pending.items() if now - entry.since >= self._timeout}
        # All messages before any removal: operations that wait for each other expire together.
        for key, entry in late.items():
            text = self._why_late(key, entry, f"{self._timeout:g} s")
            replies.append((sorted(entry.requests), _error(key, text)))
        for key, entry in late.items():
            self._timed_out.update(dict.fromkeys(entry.requests, key[1]))
            del self._pending[key]
        if self._joined and now - self._last_news >= self._timeout:
            missing = sorted(set(range(self._size)) - set(self._joined))
            replies += self._fail_join(
                f"join() waited {self._timeout:g} s (COMMSCHED_TIMEOUT) without news of ranks {missing}"
            )
        return replies

    def _fail_join(self, message: str) -> list[Reply]:
        waiting, self._joined = [r for r in self._joined if r not in self._gone], []
        return [(waiting, {"type": "join_failed", "message": message})]

    def next_deadline(self) -> float | None:
        """Return when to call `expire` next, None while nothing waits."""
        times = [
            entry.since + (self._timeout if entry.told else min(self._warning, self._timeout))
            for entry in self._pending.values()
        ]
        if self._joined:
            times.append(self._last_news + self._timeout)
        if self._failure:
            times.append(self._failure[0] + _CAUSE_SECONDS)
        return min(times, default=None)

    def _why_impossible(self, set_id: int) -> str:
        """Return why no operation of the process set can run, "" if operations can."""
        if self._over:
            return self._over
        if set_id not in self._sets:
            return "its process set has been removed"
        return "; ".join(why for rank, why in self._gone.items() if rank in self._sets[set_id])

    def _why_late(self, key: Key, entry: _Pending, waited: str) -> str:
        absent = self._awaited(key, entry)
        doing = []
        for rank in absent:
            names = [name for (_, name), other in self._pending.items() if rank in other.requests]
            if not names and self._doing.get(rank):
                doing.append(f"rank {rank} {self._doing[rank]}")
            elif not names and rank in self._timed_out:
                doing.append(f"rank {rank} waited in vain in {self._timed_out[rank]}")
            else:
                doing.append(f"rank {rank} waits in {', '.join(names) or 'nothing'}")
        return (
            f"{key[1]} waited {waited} (COMMSCHED_TIMEOUT) for ranks {absent}: {'; '.join(doing)}. Every rank"
            " of the process set must call the same operations under the same names"
        )

    def _awaited(self, key: Key, entry: _Pending) -> list[int]:
        """Return the ranks whose requests the operation waits for."""
        return [r for r in self._sets[key[0]] if r not in entry.requests and r not in self._joined]

    def _complete(self, key: Key) -> list[Reply]:
        entry, members = self._pending[key], self._sets[key[0]]
        absent: list[int] = []
        if len(entry.requests) < len(members):
            if not self._joined or self._awaited(key, entry):
                return []
            absent = [rank for rank in members if rank not in entry.requests]
        del self._pending[key]
        complaint = disagreement(entry.requests, absent)
        if complaint:
            return [(sorted(entry.requests), _error(key, complaint))]
        message = self._run_message(key, entry, absent)
        removed = self._remove_set(message["requests"][0]["ranks"][0]) if message.get("removed") else []
        return [(members, message), *removed]

    def _run_message(self, key: Key, entry: _Pending, joined: list[int]) -> Message:
        """Return what tells the ranks of the set to run an operation; ``joined``: those that give zeros."""
        first, members = next(iter(entry.requests.values())), self._sets[key[0]]
        message = {"type": "run", "set": key[0], "names": [key[1]], "requests": [first], "joined": joined}
        if first["kind"] == "allgather":
            message["rows"] = [[shape[0] for shape in entry.requests[rank]["shapes"]] for rank in members]
        elif first["kind"] == "alltoall":
            message["splits"] = [entry.requests[rank]["splits"] for rank in members]
        elif first["kind"] == "add_process_set":
            message["new_set"] = self._add_set(first["ranks"])
        elif first["kind"] == "remove_process_set":
            message["removed"] = first["ranks"][0] in self._sets
        if first["device"] != "cpu":
            message["devices"] = [
                entry.requests[rank]["device"] if rank in entry.requests else self._joined_on[rank]
                for rank in members
            ]
        return message

    def _remove_set(self, set_id: int) -> list[Reply]:
        """Fail the operations that wait in the set: they can never be complete."""
        self._sets.pop(set_id, None)
        replies = []
        for key in [key for key in self._pending if key[0] == set_id]:
            waiting = sorted(self._pending.pop(key).requests)
            replies.append((waiting, _error(key, f"{key[1]} can not run: its process set has been removed")))
        return replies

    def _add_set(self, ranks: list[int]) -> int | None:
        if ranks in self._sets.values():
            return None
        set_id = self._next_set
        self._next_set += 1
        self._sets[set_id] = ranks
        return set_id


def _error(key: Key, message: str) -> Message:
    return {"type": "error", "set": key[0], "name": key[1], "message": message}


# -- agreement -----------------------------------------------------------------------------------------------

_ZEROS_ARE_NEUTRAL = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.ADASUM)

_REDUCTIONS = ("allreduce", "reducescatter")
_FACTORS = ("op", "prescale", "postscale")
_CONCATENATIONS = ("allgather", "alltoall")
_COLLECTIVES = (*_REDUCTIONS, *_CONCATENATIONS, "broadcast")
_PROCESS_SETS = ("add_process_set", "remove_process_set")
_KINDS = (*_COLLECTIVES, *_PROCESS_SETS, "barrier")
_FIRST_DIFFERS = "only the size of the first dimension may differ"

# Must be equal on all ranks: for these kinds, this property, read like this; and the rule for users.
_ASPECTS: list[tuple[Sequence[str], str, Callable[[Message], Any], str]] = [
    (_KINDS, "kind of operation", lambda r: r["kind"], "a name must mean the same operation everywhere"),
    (_PROCESS_SETS, "ranks", lambda r: r["ranks"], "every rank must name the same process set"),
    (_COLLECTIVES, "data type", lambda r: r["dtypes"], "cast the tensors to one type on every rank"),
    (_CONCATENATIONS, "number of dimensions", lambda r: [len(s) for s in r["shapes"]], _FIRST_DIFFERS),
    (
        _CONCATENATIONS,
        "shape behind the first dimension",
        lambda r: [shape[1:] for shape in r["shapes"]],
        _FIRST_DIFFERS,
    ),
    (
        (*_REDUCTIONS, "broadcast"),
        "shape",
        lambda r: r["shapes"],
        "this operation needs equal shapes on every rank",
    ),
    (_REDUCTIONS, "reduction", lambda r: ReduceOp(r["op"]).name.title(), "pass the same op= on every rank"),
    (
        _REDUCTIONS,
        "prescale and postscale factors",
        lambda r: (r["prescale"], r["postscale"]),
        "pass the same factors on every rank",
    ),
    (("broadcast",), "root rank", lambda r: r["root"], "name the same root_rank on every rank"),
    (
        _COLLECTIVES,
        "kind of device",
        lambda r: r["device"].split(":")[0],
        "keep the tensor on the CPU, or on GPUs, everywhere",
    ),
]


def disagreement(requests: Mapping[int, Message], joined: Sequence[int]) -> str | None:
    """Return why the operation can not run, None if it can. `joined` are ranks that take part with zeros."""
    rank = min(requests)
    first = requests[rank]
    if all(other == first for other in requests.values()):
        return _impossible(first, joined)
    for other_rank, other in sorted(requests.items()):
        for kinds, aspect, value, rule in _ASPECTS:
            if first["kind"] in kinds and value(first) != value(other):
                return (
                    f"{first['name']}: the ranks disagree about the {aspect}: rank {rank} has "
                    f"{value(first)}, rank {other_rank} has {value(other)}; {rule}"
                )
    return _impossible(first, joined)


def _impossible(request: Message, joined: Sequence[int]) -> str | None:
    """Return why no ranks could run the operation on which all agree, None if they can."""
    kind = request["kind"]
    if kind in (*_CONCATENATIONS, "reducescatter") and any(not shape for shape in request["shapes"]):
        return f"{request['name']}: {kind} needs tensors with a first dimension, but got a scalar everywhere"
    if joined and not (kind == "barrier" or (kind == "allreduce" and request["op"] in _ZEROS_ARE_NEUTRAL)):
        shown = f"{kind} ({ReduceOp(request['op']).name.title()})" if kind == "allreduce" else kind
        return (
            f"{request['name']}: {shown} can not run while ranks {sorted(joined)} have joined: after join() "
            "a rank only takes part in sums and averages"
        )
    return None
