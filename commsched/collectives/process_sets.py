"""Process sets: named subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from commsched.collectives.current_carrier import carrier


class ProcessSet:
    """A subset of the ranks: register it by ``init(process_sets=[...])`` or ``add_process_set`` before use.

    ``process_set_id`` is None until then. Ranks in arguments, such as a broadcast's root, are always global.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet needs a list of ranks, but got {type(ranks_or_comm).__name__}; MPI "
                "communicators are not supported: list their ranks"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), but got {ranks!r}")
        self.ranks = sorted(ranks)

    def _members(self) -> list[int] | None:
        return None if self.process_set_id is None else carrier().process_set_ranks(self.process_set_id)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """Return this process's place within the set; None before it is registered."""
        members = self._members()
        if members is None:
            return None
        mine = carrier().launch.rank
        if mine not in members:
            raise ValueError(f"rank {mine} is not in process set {self.process_set_id} of ranks {members}")
        return members.index(mine)

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        if self.ranks is None:
            return None
        return carrier().launch.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
_added: weakref.WeakSet[ProcessSet] = weakref.WeakSet()


def registered_id(process_set: ProcessSet) -> int:
    """Return the id of `process_set`; ``ValueError`` if it is not registered."""
    if process_set.process_set_id is None:
        raise ValueError(
            f"process set {process_set} is not registered; pass it to init(process_sets=[...]) or "
            "add_process_set on every rank first"
        )
    return process_set.process_set_id


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a new process set; every rank must call this, with the same ranks and in the same order."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, size = process_set.ranks or [], carrier().launch.size
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"a process set needs distinct ranks from 0 to {size - 1}, but got {ranks}")
    set_id = carrier().add_process_set(ranks)
    if set_id is None:
        raise ValueError(f"a process set of ranks {ranks} exists already; use that one")
    process_set.process_set_id = set_id
    _added.add(process_set)
    return process_set


def forget_process_sets() -> None:
    """Unregister all sets after ``shutdown()``: the next carrier gives the same ids to other sets."""
    for process_set in _added:
        process_set.process_set_id = None
    _added.clear()


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set (all ranks must call); False for the global set and unregistered ones."""
    set_id = process_set.process_set_id
    if not set_id:
        return False
    process_set.process_set_id = None
    return carrier().remove_process_set(set_id)
