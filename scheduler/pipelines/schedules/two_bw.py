"""PipeDream-2BW: micro-batches of one step share a version, and every stage's gradient is one step old. Two
versions at every stage. ``hop`` as in 1F1B.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, endless, lead, one_stage


def two_bw(positions: int, microbatches: int, hop: int = 1) -> list[Order]:
    orders = []
    for stage in range(positions):
        items = one_stage(stage, microbatches)
        # More than one period ahead, a forward would need a version that does not exist yet.
        ahead = min(lead(positions, stage, hop), microbatches)
        orders.append(endless(items, items, ahead, {stage: -1}))
    return orders
