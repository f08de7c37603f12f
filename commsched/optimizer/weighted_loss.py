"""Exact means where ranks, or accumulated backward passes, have different numbers of samples.

A weighted loss is a mean loss times its number of samples, so gradients add up to a sum over samples. The
flags of the round carry the number of samples, and the reduced gradients are divided by all ranks' together.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from commsched.optimizer.step_state import Phase

LARGEST = 1 << 31  # a sum of flags stays below this


def weighted_loss(optimizer: Any, loss: torch.Tensor, samples: int) -> torch.Tensor:
    """Return ``loss * samples``, whose backward counts the samples."""
    count = operator.index(samples)
    if count < 1:
        raise ValueError(
            f"weighted() needs a count of at least 1, got {count}; a rank without samples calls step() only"
        )
    if optimizer._unplanned is not None or optimizer._options.sums:
        raise ValueError(
            "weighted() divides by the samples of all ranks, but op=Sum, Adasum and gradients that are"
            " reduced without a plan are not divided; use op=Average with a plan"
        )
    if optimizer._shards is not None:
        optimizer._shards.refuse_early("weighted()")
    total = loss * count
    if total.requires_grad:
        # When the backward begins: zero_grad() may be called after the forward.
        total.register_hook(lambda _: _count(optimizer, count))
    return total


def _count(optimizer: Any, count: int) -> None:
    driver = optimizer._driver
    if driver is None:
        optimizer._samples += count
        return
    reducer, ranks = driver.reducer, driver.backend.ranks
    with reducer.state.lock:
        if reducer.state.phase is Phase.SENT:
            raise ValueError(
                "a weighted loss cannot add to gradients that are reduced already; accumulate several"
                " backward passes with set_backward_passes_per_step() or no_sync(), or call step() or"
                " zero_grad() first"
            )
        reducer.samples += count
        if reducer.samples * ranks.size >= LARGEST:
            raise ValueError(
                f"rank {ranks.rank} counts {reducer.samples} samples in one step, but those of {ranks.size}"
                f" ranks must sum to less than {LARGEST}; count in larger units"
            )


def divide_alone(optimizer: Any) -> None:
    """Divide the gradients of weighted losses where no reduction does it, because there is one rank."""
    samples, optimizer._samples = optimizer._samples, 0
    for group in optimizer.param_groups if samples else ():
        for param in group["params"]:
            if param.grad is not None:
                param.grad.div_(samples)
