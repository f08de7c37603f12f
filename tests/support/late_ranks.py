"""A small training run in which the other ranks wait for a late one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import commsched as hvd


def train(steps: int, late: Callable[[int], int]) -> tuple[nn.Module, Any]:
    """Train; before each step, rank ``late(step)`` sleeps for 0.1 s. Returns the model and the optimizer."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), named_parameters=model.named_parameters()
    )
    for step in range(steps):
        if hvd.rank() == late(step):
            time.sleep(0.1)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
