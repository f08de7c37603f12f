"""The pass that puts each stage's STEP between its last backward and the first forward that needs it.

Positions here are those of an endless run, counted from the start of period 0's iteration: an action at place
``i`` of a kernel of ``n`` actions, with shift ``k``, serves period 0 at position ``i - k * n``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from scheduler.ir.actions import Action, Kind

GRADIENTS = frozenset({Kind.B, Kind.W})


def position(order: Sequence[Action], place: int, period: int = 0) -> int:
    """Where the action at ``place`` serves ``period``."""
    return place + (period - order[place].shift) * len(order)


def last_gradient(order: Sequence[Action], stage: int) -> int:
    """The place of the action that completes a stage's gradient."""
    places = (
        place for place, action in enumerate(order) if action.stage == stage and action.kind in GRADIENTS
    )
    return max(places, key=lambda place: position(order, place))


def first_forward(order: Sequence[Action], stage: int) -> int:
    """The place of the forward that is the first to use the version which period 0's step makes."""
    places = (place for place, action in enumerate(order) if action.stage == stage and action.kind is Kind.F)
    return min(places, key=lambda place: _first_use(order, place))


def _first_use(order: Sequence[Action], place: int) -> int:
    # The version after period 0 is number 1: the forwards of period 1 - version use it.
    return position(order, place, 1 - (order[place].version or 0))


def with_steps(order: Sequence[Action], relaxed: Container[int]) -> tuple[Action, ...]:
    """The order with a STEP for each stage: as soon as its gradient is complete; for ``relaxed`` stages in
    the middle of the gap, which leaves the RS before and the AG behind it half of the slack each.
    """
    inserted: dict[int, list[Action]] = {}
    for stage in sorted({action.stage for action in order if action.stage is not None}):
        last = position(order, last_gradient(order, stage))
        due = _first_use(order, first_forward(order, stage))
        if due <= last:
            raise ValueError(
                f"{order[first_forward(order, stage)]} needs a version of stage {stage} whose gradient"
                f" {order[last_gradient(order, stage)]} completes later in the same order"
            )
        after = last + (due - 1 - last) // 2 if stage in relaxed else last
        iteration, place = divmod(after, len(order))
        inserted.setdefault(place, []).append(Action(Kind.STEP, stage=stage, shift=-iteration))
    return tuple(_merge(order, inserted))


def _merge(order: Sequence[Action], inserted: dict[int, list[Action]]) -> Iterable[Action]:
    for place, action in enumerate(order):
        yield action
        yield from inserted.get(place, ())
