"""Zero bubble (ZB-H1): 1F1B with the backward in two parts. Only B, which the stage before waits for, is
urgent; W, the weight gradient, fills the gaps.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.ir.actions import Kind
from scheduler.pipelines.schedules.one_f_one_b import one_f_one_b
from scheduler.pipelines.schedules.orders import Order


def zero_bubble(positions: int, microbatches: int) -> list[Order]:
    return [_with_weights(order, stage) for stage, order in enumerate(one_f_one_b(positions, microbatches))]


def _with_weights(order: Order, late: int) -> Order:
    """Insert each W ``late`` micro-batches after its B: late stages run B first and have memory for waiting
    W.
    """
    weights = [replace(action, kind=Kind.W) for action in order if action.kind is Kind.B]
    actions, done = [], 0
    for action in order:
        actions.append(action)
        if action.kind is Kind.B:
            if done >= late:
                actions.append(weights[done - late])
            done += 1
    return (*actions, *weights[max(0, done - late) :])
