"""The pass that puts each stage's STEP between its last backward and the first forward that needs it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from scheduler.ir.actions import Action, Kind
from scheduler.ir.endless_order import first_forward, first_use, last_gradient, position


def with_steps(order: Sequence[Action], relaxed: Container[int]) -> tuple[Action, ...]:
    """The order with a STEP for each stage: as soon as its gradient is complete; for ``relaxed`` stages in
    the middle of the gap, which leaves the RS before and the AG behind it half of the slack each.
    """
    inserted: dict[int, list[Action]] = {}
    for stage in sorted({action.stage for action in order if action.stage is not None}):
        last = position(order, last_gradient(order, stage))
        due = first_use(order, first_forward(order, stage))
        if due <= last:
            raise ValueError(
                f"{order[first_forward(order, stage)]} needs a version of stage {stage} whose gradient"
                f" {order[last_gradient(order, stage)]} completes later in the same order"
            )
        after = last + (due - 1 - last) // 2 if stage in relaxed else last
        iteration, place = divmod(after, len(order))
        inserted.setdefault(place, []).append(Action(Kind.STEP, stage=stage, shift=-iteration))
    return tuple(each for place, action in enumerate(order) for each in (action, *inserted.get(place, ())))
