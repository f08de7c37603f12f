"""Which operation runs next, and whether its ranks agree: the pure half of the coordinator (no sockets, no
tensors).

Ranks submit requests in any order. A request is complete when every rank of its process set has submitted it
(or has joined); the order of completion is the one global order in which all ranks execute. Replies are
addressed: ``(ranks, message)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from commsched.collectives.torch_carrier.agreement import disagreement

Message = dict[str, Any]
Reply = tuple[list[int], Message]
Key = tuple[int, str]

# Broken connections are often told before the death that broke them. So long a failure waits for its cause.
_CAUSE_SECONDS = 5.0


@dataclass
class _Pending:
    since: float
    requests: dict[int, Message] = field(default_factory=dict)


class Negotiator:
    """The state of rank 0's coordinator. `clock` gives seconds; an operation may wait `timeout` of them."""

    def __init__(self, size: int, timeout: float, clock: Callable[[], float]) -> None:
        self._size, self._timeout, self._clock = size, timeout, clock
        self._sets: dict[int, list[int]] = {0: list(range(size))}
        self._next_set = 1
        self._pending: dict[Key, _Pending] = {}
        self._joined: list[int] = []
        self._joined_on: dict[int, str] = {}  # where each joined rank's zeros are
        self._gone: dict[int, str] = {}
        self._failure: tuple[float, str] | None = None  # since when, and what was told
        self._in_vain: dict[int, str] = {}  # by rank: what it waited for until the time-out, its last news
        self._over = ""
        self._last_news = clock()

    def submit(self, rank: int, request: Message) -> list[Reply]:
        """One rank is ready for an operation."""
        self._last_news = self._clock()
        key = (request["set"], request["name"])
        gone = self._over or self._missing_for_good(self._sets.get(request["set"]))
        if gone:
            return [([rank], _error(key, f"{request['name']} can not run: {gone}"))]
        entry = self._pending.setdefault(key, _Pending(self._last_news))
        entry.requests[rank] = request
        self._in_vain.pop(rank, None)
        return self._complete(key)

    def join(self, rank: int, device: str = "cpu") -> list[Reply]:
        """One rank has no more data: it takes part with zeros on `device` until all have joined."""
        self._last_news = self._clock()
        gone = self._over or self._missing_for_good(self._sets[0])
        if gone:
            return [([rank], {"type": "join_failed", "message": f"join() can not end: {gone}"})]
        self._joined.append(rank)
        self._joined_on[rank] = device
        replies = [reply for key in list(self._pending) for reply in self._complete(key)]
        if len(self._joined) == self._size:
            replies.append((list(range(self._size)), {"type": "joined", "last": rank}))
            self._joined = []
        return replies

    def leave(self, rank: int, reason: str, alarm: bool) -> list[Reply]:
        """A rank is gone: what waits for it fails; with `alarm` the others also drop what they are
        executing."""
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
            replies.append(
                (
                    [r for r in self._joined if r not in self._gone],
                    {"type": "join_failed", "message": f"join() can not end: {reason}"},
                )
            )
            self._joined = []
        if alarm or self._failure:
            replies += self._stop(reason, rank)
        return replies

    def fail(self, message: str) -> None:
        """An operation broke off on a rank. Why, all are told alike: by the end of another rank that follows
        at once, else by this `message`.
        """
        if not self._over and not self._failure:
            self._failure = self._clock(), message

    def _stop(self, reason: str, rank: int | None = None) -> list[Reply]:
        """Everybody drops what is executing, and what needs `rank`, which is gone; the first reason stays."""
        self._failure = None
        self._over = self._over or reason
        others = [r for r in range(self._size) if r not in self._gone]
        return [(others, {"type": "lost", "message": self._over, "rank": rank})]

    def expire(self) -> list[Reply]:
        """Errors for everything that has waited too long."""
        now = self._clock()
        replies: list[Reply] = []
        if self._failure and now - self._failure[0] >= _CAUSE_SECONDS:
            replies += self._stop(self._failure[1])
        late = {key: entry for key, entry in self._pending.items() if now - entry.since >= self._timeout}
        # All are told before any is forgotten: operations that wait for each other expire together.
        for key, entry in late.items():
            replies.append((sorted(entry.requests), _error(key, self._why_late(key, entry))))
        for key, entry in late.items():
            self._in_vain.update(dict.fromkeys(entry.requests, key[1]))
            del self._pending[key]
        if self._joined and now - self._last_news >= self._timeout:
            missing = sorted(set(range(self._size)) - set(self._joined))
            replies.append(
                (
                    self._joined,
                    {
                        "type": "join_failed",
                        "message": f"join() waited {self._timeout:g} s (COMMSCHED_TIMEOUT) without news of "
                        f"ranks {missing}",
                    },
                )
            )
            self._joined = []
        return replies

    def next_deadline(self) -> float | None:
        """When `expire` will have something to say, None while nothing waits."""
        times = [entry.since + self._timeout for entry in self._pending.values()]
        if self._joined:
            times.append(self._last_news + self._timeout)
        if self._failure:
            times.append(self._failure[0] + _CAUSE_SECONDS)
        return min(times, default=None)

    def _missing_for_good(self, members: Sequence[int] | None) -> str:
        if members is None:
            return "its process set has been removed"
        return "; ".join(self._gone[rank] for rank in members if rank in self._gone)

    def _why_late(self, key: Key, entry: _Pending) -> str:
        absent = [r for r in self._sets[key[0]] if r not in entry.requests and r not in self._joined]
        doing = []
        for rank in absent:
            names = [name for (_, name), other in self._pending.items() if rank in other.requests]
            if not names and rank in self._in_vain:
                doing.append(f"rank {rank} waited in vain in {self._in_vain[rank]}")
            else:
                doing.append(f"rank {rank} waits in {', '.join(names) or 'nothing'}")
        return (
            f"{key[1]} waited {self._timeout:g} s (COMMSCHED_TIMEOUT) for ranks {absent}: "
            f"{'; '.join(doing)}. Every rank of the process set must call the same operations under the same "
            "names"
        )

    def _complete(self, key: Key) -> list[Reply]:
        entry, members = self._pending[key], self._sets[key[0]]
        absent = [rank for rank in members if rank not in entry.requests]
        if any(rank not in self._joined for rank in absent):
            return []
        del self._pending[key]
        complaint = disagreement(entry.requests, absent)
        if complaint:
            return [(sorted(entry.requests), _error(key, complaint))]
        message = self._go(key, entry, members)
        removed = self._remove_set(message["request"]["ranks"][0]) if message.get("removed") else []
        return [(members, message), *removed]

    def _go(self, key: Key, entry: _Pending, members: list[int]) -> Message:
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
        """What still waits among the set's ranks can never be complete."""
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
