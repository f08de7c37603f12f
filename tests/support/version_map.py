"""Which weight version each computation of a run uses, read off the unrolled program."""

from __future__ import annotations

from scheduler.ir.actions import Kind
from scheduler.ir.program import COMPUTE_LANE, Program, unroll, version

Use = tuple[int, int, int]
"""Stage, micro-batch and period."""


def version_map(program: Program, periods: int) -> dict[Use, int]:
    """The version that each (stage, micro-batch, period) computes with in a run of so many periods; version v
    is the weights after v steps.
    """
    found: dict[Use, int] = {}
    for lanes in unroll(program, periods):
        for action in lanes[COMPUTE_LANE]:
            if action.kind is Kind.F and action.stage is not None:
                found[action.stage, action.index, action.shift] = version(action)
    return found
