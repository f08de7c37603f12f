"""A small training run in which the other ranks wait for a late one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.carrier import carrier


def train(steps: int, late: Callable[[int], int]) -> tuple[nn.Module, Any]:
    """Train; return the model and the optimizer.

    In each step, rank ``late(step)`` sleeps for 0.1 s before its forward. It falls asleep when the others
    have ended their backward, after which they wait for it.
    """
    hvd.init()
    store = carrier().meeting.store
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters()
    )
    # Measurements are made again where other work disturbed them: too few steps would be left after the plan.
    optimizer._session._repeats = 0
    for step in range(steps):
        keys = [f"late_ranks/{step}/{rank}" for rank in range(hvd.size())]
        if hvd.rank() == late(step):
            store.wait([key for rank, key in enumerate(keys) if rank != hvd.rank()])
            time.sleep(0.1)
        model(torch.randn(8, 64)).square().mean().backward()
        if hvd.rank() != late(step):
            store.set(keys[hvd.rank()], "")
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
