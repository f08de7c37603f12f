"""PipeDream: 1F1B that never drains; weight stashing gives each backward the weights of its forward.

Stage s of S runs S-1-s micro-batches ahead. With one micro-batch per step it keeps S-s versions and its
gradient is S-1-s steps old; with M of them, ceil((S-1-s) / M) steps.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, endless, one_stage


def pipedream(positions: int, microbatches: int = 1) -> list[Order]:
    orders = []
    for stage in range(positions):
        items = one_stage(stage, microbatches)
        ahead = positions - 1 - stage
        delay = -(-ahead // microbatches)
        orders.append(endless(items, items, ahead, {stage: -delay}))
    return orders
