"""Trains where the planner believes that each message takes a second, and prints what was tried."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch
from torch import nn

import commsched as hvd
from commsched.optimizer.planner import TimedLink
from scheduler.ir.link import Link

LAYERS, WIDTH, PAUSE = 12, 512, 0.015  # layers of 1 MB; seconds of each one's forward, and of its backward


class Paced(nn.Linear):
    """A layer that takes its time without a processor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        x = super().forward(x)
        x.register_hook(lambda _: time.sleep(PAUSE))
        return x


torch.set_num_threads(1)
torch.manual_seed(1)
hvd.init()
model = nn.Sequential(*(Paced(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
with patch.object(TimedLink, "refined", lambda *_: Link(alpha=1.0, beta=1e-9)):
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    session, trials, steps = optimizer._session, 0, 0
    while steps < 200:
        steps += 1
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not hvd.is_settled(optimizer):
            continue
        trial, trials = session.trial, trials + 1
        if trial.now or trials == 3:
            break
        session.trial = None
        session._start_measuring()  # other work on this machine may have disturbed the trial
searched, *others = trial.plans
print(f"searched {len(searched.program.buckets)} bucket, tried {[len(it.program.buckets) for it in others]}")
print(f"used {trial.now} after {trials} trials in {steps} steps: {trial.seconds}")
optimizer.close()
hvd.shutdown()
