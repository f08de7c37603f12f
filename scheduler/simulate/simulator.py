"""The simulator: how long a program takes on a model and a link, and what happens when.

    result = simulate(program, profile, Link(alpha=2e-4, beta=8e-10))
    result.period, result.exposed, result.link_utilisation, result.timeline

The program is lowered to a task graph and run event by event for as many iterations as it takes to settle:
once two iterations differ only by a constant, all that follow do too, and the constant is the period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scheduler.ir.actions import Action
from scheduler.ir.link import Cluster, Links
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.simulate.lowering import lower_data_parallel, lower_pipeline
from scheduler.simulate.task_graph import COMPUTE, HIDDEN_LANE, LINK, TaskGraph

MOST_ITERATIONS = 128
MOST_TASKS = 500_000
_TOLERANCE = 1e-9
_CYCLES = 4
"""Settled behaviour may repeat only every few iterations; this is how many are tried."""


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran. Times are seconds from the start of the iteration shown."""

    action: Action
    lane: str
    rank: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """The action without its shift, as pictures show it: the position in time already shows the
        iteration.
        """
        return str(replace(self.action, shift=0))


@dataclass(frozen=True)
class Result:
    """What the simulator found. All times in seconds.

    ``period``: one iteration in the steady state. ``compute``: what the busiest rank computes in it at full
    speed, updates in its compute lane included. ``link_utilisation``: the part of the period in which a link
    is busy. ``settled``: the period is exact; otherwise it is a mean over the iterations simulated.
    """

    period: float
    compute: float
    link_utilisation: float
    settled: bool
    graph: TaskGraph = field(repr=False)
    start: np.ndarray = field(repr=False)
    end: np.ndarray = field(repr=False)

    @property
    def exposed(self) -> float:
        """Seconds of the period that are not compute: communication that no compute hides."""
        return max(0.0, self.period - self.compute)

    @property
    def iterations(self) -> int:
        return len(self.start)

    @cached_property
    def timeline(self) -> tuple[Event, ...]:
        """The last iteration, sorted by start."""
        start, end = self.start[-1], self.end[-1]
        origin = start.min()
        events = [
            Event(task.action, task.lane, task.rank, float(start[i] - origin), float(end[i] - origin))
            for i, task in enumerate(self.graph.tasks)
            if task.lane != HIDDEN_LANE
        ]
        return tuple(sorted(events, key=lambda event: (event.start, event.end)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "period": self.period,
            "exposed": self.exposed,
            "compute": self.compute,
            "link_utilisation": self.link_utilisation,
            "settled": self.settled,
        }


def simulate(
    program: Program,
    profile: Profile,
    link: Links,
    *,
    iterations: int | None = None,
    slowdown: float = 0.0,
    jitter: float = 0.0,
    ranks: int | None = None,
    seed: int = 0,
) -> Result:
    """Runs a program.

    ``iterations``: how many; by default as many as it takes to settle. ``slowdown``: compute takes ``1 +
    slowdown`` times as long while a link is busy. ``jitter``: relative standard deviation of each rank's
    speed in each iteration. ``ranks``: how many ranks to run (by default all of them with jitter, one
    without: equal ranks do the same at the same time).
    """
    for name, value in (("slowdown", slowdown), ("jitter", jitter)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if ranks is None:
        ranks = program.ranks if jitter or len(program.kernel) > 1 else 1
    tasks = ranks * sum(map(len, program.lanes().values()))
    if tasks > MOST_TASKS:
        raise ValueError(
            f"{ranks} ranks one by one are about {tasks} tasks, more than {MOST_TASKS};"
            " simulate fewer with ranks=N"
        )
    return run(lower(program, profile, link, ranks), iterations, slowdown, jitter, seed)


def lower(
    program: Program, profile: Profile, link: Links | Cluster, ranks: int = 1, handling: Sequence[float] = ()
) -> TaskGraph:
    """The task graph of ``ranks`` ranks: 1 is enough where all ranks do the same at the same speed. Programs
    with stages always get all of their ranks; ``handling``: seconds that each of these needs between two
    actions.
    """
    if program.layers != len(profile.layers):
        raise ValueError(
            f"the plan is for a model of {program.layers} layers, profile {profile.name!r} has"
            f" {len(profile.layers)}; make a plan for this profile"
        )
    if program.pipeline is not None:
        return lower_pipeline(program, profile, link, handling)
    if isinstance(link, Cluster):
        raise ValueError("a cluster gives the wires of programs with stages; give a Link for this program")
    return lower_data_parallel(program, profile, link, ranks)


def run(
    graph: TaskGraph, iterations: int | None = None, slowdown: float = 0.0, jitter: float = 0.0, seed: int = 0
) -> Result:
    if iterations is None and jitter:
        iterations = 32
    tries = [iterations] if iterations else [2 + graph.longest_lag, 8, 32, MOST_ITERATIONS]
    for count in tries:
        start, end = _execute(graph, count, slowdown, _speeds(count, graph.ranks, jitter, seed))
        period = None if jitter else _settled_period(start, end, graph.longest_lag)
        if period is not None:
            break
    settled = period is not None
    if period is None:
        period = _mean_period(end)
    used = graph.work(LINK) / (graph.links * period) if graph.links and period else 0.0
    return Result(period, graph.work(COMPUTE), used, settled, graph, start, end)


def _execute(
    graph: TaskGraph, iterations: int, slowdown: float, factor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    from scheduler.simulate.kernels import run_events

    start, end, done = run_events(iterations, graph.arrays, factor, float(slowdown))
    if done < start.size:
        stuck = graph.stuck()
        some = ", ".join(str(graph.tasks[task]) for task in stuck[:8])
        raise ValueError(
            f"the program deadlocks: {len(stuck)} actions can never run ({some}); validate() shows where"
        )
    return start, end


def _speeds(iterations: int, ranks: int, jitter: float, seed: int) -> np.ndarray:
    if not jitter:
        return np.ones((iterations, ranks))
    # Lognormal with mean 1 and relative standard deviation `jitter`: never negative, with a tail of slow
    # ranks.
    sigma = np.sqrt(np.log1p(jitter**2))
    noise = np.random.default_rng(seed).standard_normal((iterations, ranks))
    return np.exp(sigma * noise - sigma**2 / 2)


def _settled_period(start: np.ndarray, end: np.ndarray, memory: int) -> float | None:
    """Seconds per iteration once iterations repeat, or None while they do not.

    An iteration depends on the ``memory`` iterations before it, so that many iterations must repeat.
    """
    times = np.stack([start, end])
    for cycle in range(1, _CYCLES + 1):
        recent = times[:, -max(1, memory) :]
        before = times[:, -max(1, memory) - cycle : -cycle]
        if before.shape != recent.shape:
            return None
        step = recent - before
        if np.ptp(step) <= _TOLERANCE * max(1e-300, float(end[-1].max())):
            return float(step.mean()) / cycle
    return None


def _mean_period(end: np.ndarray) -> float:
    finished = end.max(axis=1)
    skip = len(finished) // 4
    if len(finished) == 1:
        return float(finished[0])
    return float((finished[-1] - finished[skip]) / (len(finished) - 1 - skip))
