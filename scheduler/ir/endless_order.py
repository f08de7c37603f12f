"""Positions in an endless run of a kernel's order, counted from the start of period 0's iteration: an action
at place ``i`` of an order of ``n`` actions, with shift ``k``, serves period 0 at position ``i - k * n``.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.ir.actions import Action, Kind

GRADIENTS = frozenset({Kind.B, Kind.W})


def position(order: Sequence[Action], place: int, period: int = 0) -> int:
    """The position at which the action at ``place`` runs for ``period``."""
    return place + (period - order[place].shift) * len(order)


def last_gradient(order: Sequence[Action], stage: int) -> int:
    """The place of the action that completes a stage's gradient."""
    places = (
        place for place, action in enumerate(order) if action.stage == stage and action.kind in GRADIENTS
    )
    return max(places, key=lambda place: position(order, place))


def first_forward(order: Sequence[Action], stage: int) -> int:
    """The place of the first forward that uses the weight version made by the STEP of period 0."""
    places = (place for place, action in enumerate(order) if action.stage == stage and action.kind is Kind.F)
    return min(places, key=lambda place: first_use(order, place))


def first_use(order: Sequence[Action], place: int) -> int:
    """The first position at which the forward at ``place`` uses the version made by the STEP of period 0."""
    # The version after period 0 is number 1: the forwards of period 1 - version use it.
    return position(order, place, 1 - (order[place].version or 0))
