"""Decides which operation runs next: the pure half of the coordinator, without sockets and tensors.

Ranks submit requests in any order. A request is complete when every rank of its process set has submitted it
or has joined. All ranks run operations in the order of completion. A reply is a pair: ``(ranks, message)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from commsched.collectives.torch_carrier.agreement import disagreement

Message = dict[str, Any]
Reply = tuple[list[int], Message]
Key = tuple[int, str]

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

    After `warning` seconds, the first rank that waits is told for whom.
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
        self._over = ""  # why all operations fail from now on
        self._last_news = clock()

    def submit(self, rank: int, request: Message) -> list[Reply]:
        """Add one rank's request for an operation."""
        self._last_news = self._clock()
        key = (request["set"], request["name"])
        reason = self._why_impossible(request["set"])
        if reason:
            return [([rank], _error(key, f"{request['name']} can not run: {reason}"))]
        entry = self._pending.setdefault(key, _Pending(self._last_news))
        entry.requests[rank] = request
        self._timed_out.pop(rank, None)
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

    def hear(self) -> None:
        """Note that ranks that have not joined go on: optimizers exchange gradients without requests."""
        self._last_news = self._clock()

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
        return "; ".join(self._gone[rank] for rank in self._sets[set_id] if rank in self._gone)

    def _why_late(self, key: Key, entry: _Pending, waited: str) -> str:
        absent = self._awaited(key, entry)
        doing = []
        for rank in absent:
            names = [name for (_, name), other in self._pending.items() if rank in other.requests]
            if not names and rank in self._timed_out:
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
        if self._awaited(key, entry):
            return []
        absent = [rank for rank in members if rank not in entry.requests]
        del self._pending[key]
        complaint = disagreement(entry.requests, absent)
        if complaint:
            return [(sorted(entry.requests), _error(key, complaint))]
        message = self._run_message(key, entry, members)
        removed = self._remove_set(message["request"]["ranks"][0]) if message.get("removed") else []
        return [(members, message), *removed]

    def _run_message(self, key: Key, entry: _Pending, members: list[int]) -> Message:
        first = next(iter(entry.requests.values()))
        message = {
            "type": "run",
            "set": key[0],
            "name": key[1],
            "request": first,
            "joined": [rank for rank in members if rank not in entry.requests],
        }
        ordered = [entry.requests.get(rank, first) for rank in members]
        if first["kind"] == "allgather":
            message["rows"] = [[shape[0] for shape in request["shapes"]] for request in ordered]
        elif first["kind"] == "alltoall":
            message["splits"] = [request["splits"] for request in ordered]
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
