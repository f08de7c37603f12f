"""Task graphs: what a program becomes before it is simulated or checked for deadlock.

A task does one action of one rank once in every iteration. An edge ``(before, after, lag)`` says that
``after`` of iteration ``k`` waits for ``before`` of iteration ``k - lag``. What keeps two tasks apart on one
resource is an edge too: lanes are ordered lists, so "one at a time" is "each after the one before it", the
first one after the last one of the previous iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scheduler.ir.actions import Action

OTHER, COMPUTE, LINK = 0, 1, 2
"""What a task occupies: nothing shared, a rank's compute, or a link (traffic on it may slow the compute)."""

EVERY_RANK = -1

HIDDEN_LANE = ""
"""The lane of tasks that only join dependencies. They take no time and are not drawn."""


@dataclass(frozen=True, slots=True)
class Task:
    """An action in its lane. ``rank`` is ``EVERY_RANK`` for a collective, which is one task of all ranks."""

    action: Action
    lane: str
    rank: int = EVERY_RANK

    def __str__(self) -> str:
        return f"{self.action}" if self.rank == EVERY_RANK else f"{self.action} of rank {self.rank}"


class Arrays(NamedTuple):
    """Durations (seconds), resources and ranks of tasks; the successors of task ``i``, and their lags, stand
    from ``row[i]`` to ``row[i + 1]``.
    """

    duration: np.ndarray
    resource: np.ndarray
    rank: np.ndarray
    row: np.ndarray
    successor: np.ndarray
    lag: np.ndarray


@dataclass(frozen=True)
class TaskGraph:
    tasks: tuple[Task, ...]
    arrays: Arrays

    @property
    def ranks(self) -> int:
        return int(self.arrays.rank.max(initial=0)) + 1

    @cached_property
    def longest_lag(self) -> int:
        return int(self.arrays.lag.max(initial=0))

    @cached_property
    def links(self) -> int:
        """The number of distinct links that the tasks use."""
        used = (self.tasks[task] for task in np.flatnonzero(self.arrays.resource == LINK))
        return len({(task.rank, task.lane) for task in used})

    def work(self, resource: int) -> float:
        """Seconds per iteration of the busiest rank on this resource; for links, the sum over all links."""
        mine = self.arrays.resource == resource
        seconds = self.arrays.duration[mine]
        if resource == LINK:
            return float(seconds.sum())
        return float(np.bincount(self.arrays.rank[mine], seconds).max(initial=0.0))

    def stuck(self) -> list[int]:
        """Tasks that can never run: those on, or behind, a cycle of waiting within one iteration (Kahn's
        algorithm).
        """
        row, successor, lag = self.arrays.row, self.arrays.successor, self.arrays.lag
        waiting = np.bincount(successor[lag == 0], minlength=len(self.tasks))
        free = [int(task) for task in np.flatnonzero(waiting == 0)]
        while free:
            task = free.pop()
            for edge in range(row[task], row[task + 1]):
                after = int(successor[edge])
                if lag[edge] == 0:
                    waiting[after] -= 1
                    if waiting[after] == 0:
                        free.append(after)
        return [int(task) for task in np.flatnonzero(waiting > 0)]


@dataclass
class GraphBuilder:
    """Collects tasks and edges. ``task`` returns the number by which ``edge`` knows it."""

    tasks: list[Task] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    edges: set[tuple[int, int, int]] = field(default_factory=set)

    def task(self, task: Task, duration: float, resource: int) -> int:
        self.tasks.append(task)
        self.duration.append(duration)
        self.resource.append(resource)
        return len(self.tasks) - 1

    def edge(self, before: int, after: int, lag: int = 0) -> None:
        """Let ``after`` wait for ``before``. ``lag`` is relative to the iteration that each task serves: the
        shifts of both actions are added here.
        """
        lag += self.tasks[before].action.shift - self.tasks[after].action.shift
        if lag < 0:
            raise ValueError(
                f"{self.tasks[after]} waits for {self.tasks[before]}, which the kernel does {-lag} iterations"
                " later; shift the actions so that what is waited for stands in the same or an earlier one"
            )
        self.edges.add((before, after, lag))

    def lane(self, tasks: Sequence[int]) -> None:
        """Run these tasks one at a time in this order, in every iteration."""
        for before, after in zip(tasks, tasks[1:], strict=False):
            self.edges.add((before, after, 0))
        if tasks:
            self.edges.add((tasks[-1], tasks[0], 1))

    def build(self) -> TaskGraph:
        edges = np.array(sorted(self.edges), np.int64).reshape(-1, 3)
        counts = np.bincount(edges[:, 0], minlength=len(self.tasks))
        arrays = Arrays(
            np.array(self.duration, float),
            np.array(self.resource, np.int64),
            np.array([task.rank for task in self.tasks], np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.ascontiguousarray(edges[:, 1]),
            np.ascontiguousarray(edges[:, 2]),
        )
        return TaskGraph(tuple(self.tasks), arrays)
