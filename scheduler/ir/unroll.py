"""From a kernel to a run of so many periods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.ir.actions import Action
from scheduler.ir.program import Lanes, Program

Run = list[dict[str, tuple[Action, ...]]]
"""Every rank's lanes, unrolled."""


def reach(kernel: Iterable[Lanes]) -> tuple[int, int]:
    """How many periods the actions of one iteration look back and ahead at most."""
    shifts = [action.shift for lanes in kernel for order in lanes.values() for action in order]
    return max(0, -min(shifts, default=0)), max(0, max(shifts, default=0))


def depth(program: Program) -> int:
    """How many iterations more than kernel runs there are, split between its start and its end."""
    return sum(reach(program.kernel))


def unroll(program: Program, periods: int, only: Sequence[str] | None = None) -> Run:
    """Every rank's lanes (or ``only`` some) over a whole run, as actions whose shift is their period, from 0
    to ``periods - 1``.

    The run starts and ends with iterations of the kernel in which the periods that do not exist are left out.
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
    """The number of the weight version that an unrolled action computes with: steps taken so far."""
    return max(0, (action.shift if period is None else period) + (action.version or 0))
