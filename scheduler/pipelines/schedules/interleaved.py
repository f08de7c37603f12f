"""Interleaved 1F1B: a rank holds ``virtual`` stages, ``positions`` apart, which divides the bubble by their
number.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, block_by_block, blocks, flushed


def interleaved(positions: int, microbatches: int, virtual: int = 2) -> list[Order]:
    if virtual < 1:
        raise ValueError(f"interleaved needs at least 1 stage on each rank, got virtual={virtual}")
    groups = blocks(microbatches, positions)
    orders = []
    for position in range(positions):
        stages = [position + chunk * positions for chunk in range(virtual)]
        forward = block_by_block(stages, groups)
        backward = block_by_block(stages[::-1], groups)
        # Two slots for every rank after this one, so that the next chunk of a block arrives before its turn.
        ahead = (virtual - 1) * len(groups[0]) + 2 * (positions - 1 - position)
        orders.append(flushed(forward, backward, min(ahead, len(forward))))
    return orders
