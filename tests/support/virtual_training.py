"""A training over virtual ranks whose bits no ranks may change: dropout, batch norm, an unused layer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import commsched as hvd

SAMPLES, BATCH = 331, 3
"""With 8 virtual ranks, the last step of the data deals the first five samples out again."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(13, 37), nn.BatchNorm1d(37)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(37, 5)
        self.other, self.unused = nn.Linear(5, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.dropout(torch.relu(self.norm(self.first(x)))))
        if x[0, 0] > 0:  # of some virtual ranks only
            y = y + self.other(y)
        return y.square().mean()


def made_model() -> Net:
    """Return the model with the same weights everywhere, whatever was drawn before."""
    model = Net()
    seeded = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded) * 0.3)
    return model


def trained(
    gather: str,
    steps: int,
    count: int = 8,
    before_step: Callable[[Any], None] = lambda state: None,
    after_step: Callable[[Any], None] = lambda state: None,
) -> tuple[str, list[int]]:
    """Train on the job there is; return a digest of all bits, and how many ranks each step had."""
    torch.manual_seed(hvd.rank())  # every rank begins with other random numbers
    model = made_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer: Any = hvd.DistributedOptimizer(adamw, model=model, gather=gather)
    data = torch.randn(SAMPLES, 13, generator=torch.Generator().manual_seed(3))
    sampler = hvd.elastic.ElasticSampler(data)

    @hvd.elastic.run(virtual_ranks=count)
    def train(state: Any) -> None:
        while state.step < steps:
            before_step(state)
            optimizer.zero_grad()
            for v in hvd.elastic.virtual_ranks(state):
                model(data[sampler.batch(v, BATCH)]).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            sampler.record_batch(state.step, BATCH)
            if not sampler.batch(0, BATCH):
                sampler.set_epoch(sampler.epoch + 1)
            state.sizes.append(hvd.size())
            state.step += 1
            after_step(state)
            state.commit()

    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, sizes=[])
    train(state)
    found = digest(model, optimizer)
    optimizer.close()
    return found, state.sizes


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters, buffers and optimizer state."""
    values = hashlib.sha256()
    for tensor in model.state_dict().values():
        values.update(tensor.numpy().tobytes())
    for _, entries in sorted(optimizer.state_dict()["state"].items()):
        for _, value in sorted(entries.items()):
            values.update(torch.as_tensor(value).numpy().tobytes())
    return values.hexdigest()[:16]
