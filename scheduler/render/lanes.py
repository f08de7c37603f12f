"""Events by lane, in the order of all pictures."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.ir.program import COMPUTE_LANE
from scheduler.simulate.simulator import Event
from scheduler.simulate.task_graph import EVERY_RANK


def lanes_of(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Group events by lane: each rank's compute, its other lanes, then the lanes that all ranks share.

    With a single rank, lane names have no rank number.
    """
    found: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        found.setdefault((event.rank, event.lane), []).append(event)
    several = len({rank for rank, _ in found if rank != EVERY_RANK}) > 1

    def place(key: tuple[int, str]) -> tuple[bool, int, bool, str]:
        rank, lane = key
        return rank == EVERY_RANK, rank, lane != COMPUTE_LANE, lane

    def name(key: tuple[int, str]) -> str:
        rank, lane = key
        return f"{lane} {rank}" if several and rank != EVERY_RANK else lane

    return {name(key): found[key] for key in sorted(found, key=place)}
