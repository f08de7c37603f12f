"""A simulated pipeline's period, bubbles, memory and delays.

report = examine(program, profile, Link.parse("10gbit"))
print(report)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.ir.layout import Layout
from scheduler.ir.profile import Profile
from scheduler.ir.program import COMPUTE_LANE, Program, delays
from scheduler.simulate.costs import Wires, memory_by_rank
from scheduler.simulate.simulator import Result, lower, run
from scheduler.simulate.task_graph import COMPUTE


@dataclass(frozen=True)
class PipelineReport:
    """``period``: seconds per optimizer step at rest. ``bubble``: the part of it in which a rank computes
    nothing, by rank. ``memory``: bytes by rank. ``delays``, ``versions``, ``activations``: by stage.
    ``result`` has the timeline.
    """

    schedule: str
    period: float
    bubble: tuple[float, ...]
    memory: tuple[int, ...]
    delays: tuple[int, ...]
    versions: tuple[int, ...]
    activations: tuple[int, ...]
    result: Result = field(repr=False, compare=False)

    @property
    def bubble_fraction(self) -> float:
        """The fraction of time without compute, averaged over the ranks."""
        return float(np.mean(self.bubble))

    def __str__(self) -> str:
        return (
            f"{self.schedule}: {self.period:.4g} s per step, bubble {self.bubble_fraction:.1%}, peak memory"
            f" {max(self.memory):,} bytes\n"
            f"  delays      {_row(self.delays)}\n"
            f"  versions    {_row(self.versions)}\n"
            f"  activations {_row(self.activations)}"
        )


def examine(
    program: Program, profile: Profile, link: Wires, handling: Sequence[float] = ()
) -> PipelineReport:
    """Simulates a program with stages. ``link`` is one wire for everything a rank sends, a mapping with
    ``link`` for collectives and ``send`` for the messages between stages, or a cluster. ``handling``: seconds
    that each rank needs between two actions (receiving, queueing, sending) besides the computation.
    """
    layout = program.pipeline
    if layout is None:
        raise ValueError("only programs with stages have bubbles; simulate() serves the others")
    result = run(lower(program, profile, link, handling=handling))
    return PipelineReport(
        schedule=program.policy,
        period=result.period,
        bubble=_idle(result, program, layout, handling),
        memory=memory_by_rank(program, profile),
        delays=delays(program),
        versions=layout.versions,
        activations=layout.activations,
        result=result,
    )


def _idle(result: Result, program: Program, layout: Layout, handling: Sequence[float]) -> tuple[float, ...]:
    graph = result.graph.arrays
    computing = graph.resource == COMPUTE
    busy = np.bincount(graph.rank[computing], graph.duration[computing], layout.world)
    for rank, seconds in enumerate(handling):
        busy[rank] -= seconds * len(program.kernel[rank][COMPUTE_LANE])
    return tuple(float(1 - seconds / result.period) for seconds in busy)


def _row(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))
