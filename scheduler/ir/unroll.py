"""From a kernel to a run of so many periods, and back to prologue and epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.ir.actions import Action
from scheduler.ir.program import Lanes, Program

Sections = list[dict[str, tuple[Action, ...]]]


def reach(kernel: Iterable[Lanes]) -> tuple[int, int]:
    """How many periods the actions of one iteration look back and ahead at most."""
    shifts = [action.shift for lanes in kernel for order in lanes.values() for action in order]
    return max(0, -min(shifts, default=0)), max(0, max(shifts, default=0))


def depth(program: Program) -> int:
    """How many iterations more than kernel runs there are, split between prologue and epilogue."""
    return sum(reach(program.kernel))


def sections(kernel: Sequence[Lanes]) -> tuple[Sections, Sections]:
    """Prologue and epilogue of a kernel: its iterations at both ends of a run, without the periods that do
    not exist. The prologue's periods count from the first, the epilogue's from ``depth`` before the last.
    """
    back, ahead = reach(kernel)
    prologue = [
        {lane: tuple(_ended(order, range(-ahead, back), first=0)) for lane, order in lanes.items()}
        for lanes in kernel
    ]
    span = back + ahead
    epilogue = [
        {lane: tuple(_ended(order, range(back, back + span), last=span - 1)) for lane, order in lanes.items()}
        for lanes in kernel
    ]
    if not span:
        return [], []
    return prologue, epilogue


def _ended(
    order: Sequence[Action], iterations: range, first: int | None = None, last: int | None = None
) -> Iterable[Action]:
    for iteration in iterations:
        for action in order:
            period = iteration + action.shift
            if (first is None or period >= first) and (last is None or period <= last):
                yield action.at(period)


def unroll(program: Program, periods: int, only: Sequence[str] | None = None) -> Sections:
    """Every rank's lanes (or ``only`` some) over a whole run, as actions whose shift is their period, from 0
    to ``periods - 1``.

    Runs shorter than the pipeline is deep have no kernel iteration of their own: they are cut out of it.
    """
    span = depth(program)
    if not span or periods < span or not program.prologue:
        back, ahead = reach(program.kernel)
        whole = range(-ahead, periods + back)
        return [
            {
                lane: tuple(_ended(order, whole, 0, periods - 1))
                for lane, order in lanes.items()
                if only is None or lane in only
            }
            for lanes in program.kernel
        ]
    back, _ = reach(program.kernel)
    runs = periods - span
    return [
        {
            lane: (
                *program.prologue[rank].get(lane, ()),
                *(a.at(a.shift + back + run) for run in range(runs) for a in order),
                *(a.at(a.shift + runs) for a in program.epilogue[rank].get(lane, ())),
            )
            for lane, order in lanes.items()
            if only is None or lane in only
        }
        for rank, lanes in enumerate(program.kernel)
    ]


def version(action: Action, period: int | None = None) -> int:
    """The number of the weight version that an unrolled action computes with: steps taken so far."""
    return max(0, (action.shift if period is None else period) + (action.version or 0))
