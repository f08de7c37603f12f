"""Small objects between ranks, for agreeing on plans. Collective: every rank of the process set must call."""

from __future__ import annotations

from typing import TypeVar

from commsched.collectives.objects import broadcast_object as _broadcast_object
from commsched.collectives.objects import gather_objects as _gather_objects
from commsched.collectives.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_object(obj: T, root: int = 0, process_set: ProcessSet = global_process_set) -> T:
    """Rank `root`'s `obj`, on every rank."""
    return _broadcast_object(obj, root, name="commsched.control", process_set=process_set)


def allgather_object(obj: T, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every rank's `obj`, in rank order."""
    return _gather_objects(obj, "commsched.control", process_set)
