"""AshPipe: PipeDream's order with one micro-batch per step, and stages replicated as each one needs.

Replicas split every minibatch by rows; neighbouring stages may have different numbers of them. The gradient
goes upstream before it is reduced (placement ``bubble``). ``recompute`` belongs to the layout.
"""

from __future__ import annotations

from scheduler.pipelines.schedules.orders import Order
from scheduler.pipelines.schedules.pipedream import pipedream


def ashpipe(positions: int, microbatches: int = 1) -> list[Order]:
    if microbatches != 1:
        raise ValueError(
            f"ashpipe steps after every minibatch and does not divide it, got {microbatches} micro-batches;"
            " use microbatches=1, or pipedream or 2bw"
        )
    return pipedream(positions)
