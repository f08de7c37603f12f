"""WPipe: two groups of stages on each rank; only the first group's gradient is one step old.

Rank s holds stage s (group G0) and s+S (G1). A block of micro-batches goes forward through G0, then G1, and
backward through G1, then G0. The next block's G0 forwards run beside this one's G0 backwards, so G0 needs two
versions; G1 is at rest between its blocks, so it can step at once and needs one.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order, block_by_block, blocks, endless


def wpipe(positions: int, microbatches: int) -> list[Order]:
    groups = blocks(microbatches, positions)
    first, last = len(groups[0]), len(groups[-1])
    orders = []
    for position in range(positions):
        stages = [position, position + positions]
        forward = block_by_block(stages, groups)
        backward = block_by_block(stages[::-1], groups)
        # With a larger lead, a forward of G1 would run before the STEP whose weights it needs.
        ahead = min(first + positions - 1 - position, first + last)
        orders.append(endless(forward, backward, ahead, {stages[0]: -1, stages[1]: 0}))
    return orders
