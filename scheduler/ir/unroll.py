"""Unroll a kernel into a run of a given number of periods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.ir.actions import Action
from scheduler.ir.program import Lanes, Program

Run = list[dict[str, tuple[Action, ...]]]
"""Every rank's lanes, unrolled."""


def reach(kernel: Iterable[Lanes]) -> tuple[int, int]:
    """The largest negative and the largest positive shift of a kernel, both as numbers of periods."""
    shifts = [action.shift for lanes in kernel for order in lanes.values() for action in order]
    return max(0, -min(shifts, default=0)), max(0, max(shifts, default=0))


def depth(program: Program) -> int:
    """The iterations that a run needs beyond its periods to fill and to drain the pipeline."""
    return sum(reach(program.kernel))


def unroll(program: Program, periods: int, only: Sequence[str] | None = None) -> Run:
    """Every rank's lanes (or ``only`` some) over a whole run, as actions whose shift is their period, from 0
    to ``periods - 1``.

    The first and last iterations of the kernel are incomplete: actions of periods outside the run are left
    out.
    """
    back, ahead = reach(program.kernel)
    iterations = range(-ahead, periods + back)
    return [
        {
            lane: tuple(
                action.at(iteration + action.shift)
                for iteration in iterations
                for action in order
                if 0 <= iteration + action.shift < periods
            )
            for lane, order in lanes.items()
            if only is None or lane in only
        }
        for lanes in program.kernel
    ]


def version(action: Action, period: int | None = None) -> int:
    """The weight version that an unrolled action computes with: the number of optimizer steps before it."""
    return max(0, (action.shift if period is None else period) + (action.version or 0))
