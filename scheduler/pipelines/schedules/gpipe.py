"""GPipe: all forwards, then all backwards. Simple, but every micro-batch's activations live at once."""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, flushed, one_stage


def gpipe(positions: int, microbatches: int) -> list[Order]:
    orders = []
    for stage in range(positions):
        items = one_stage(stage, microbatches)
        orders.append(flushed(items, items, ahead=microbatches))
    return orders
