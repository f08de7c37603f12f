"""Which program a pipeline runs: a plan's, a given one, or that of a schedule by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commsched.pipeline import start
from commsched.pipeline.chain import Chain
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.program import Program


def choose(
    chain: Chain,
    plan: PipelinePlan | str | Path | None,
    schedule: str | Program,
    microbatches: int,
    mesh: tuple[int, int | Sequence[int]],
    cuts: Sequence[int | str] | None,
    options: dict[str, Any],
    **layout: Any,
) -> tuple[Program, Chain]:
    """The program, and the chain whose layers it counts."""
    if plan is not None:
        return start.planned(plan, chain)
    if isinstance(schedule, Program):
        return schedule, chain
    return start.generated(chain, schedule, microbatches, mesh, cuts, options, **layout), chain
