"""1F1B: a stage runs only as many forwards ahead as it takes to reach the last stage.

With ``hop`` 1 a message is on the critical path of every micro-batch; with 2 there is time for it behind the
computation, and up to twice as many activations.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, flushed, lead, one_stage


def one_f_one_b(positions: int, microbatches: int, hop: int = 1) -> list[Order]:
    orders = []
    for stage in range(positions):
        items = one_stage(stage, microbatches)
        orders.append(flushed(items, items, min(lead(positions, stage, hop), microbatches)))
    return orders
