"""Quantised gradients of a stage's replicas: the bits of ``DistributedOptimizer`` on the same ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.pipeline import Job
from commsched.training.loop import pipeline_of, state_of
from tests.support.cases import Me, case, main
from tests.support.pipeline_runs import loss_of
from tests.support.quantised_training import COMPRESSIONS


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@case(ranks=(2, 4))
def replicas_train_as_a_distributed_optimizer_does(me: Me) -> None:
    torch.manual_seed(0)
    dice = torch.Generator().manual_seed(3)
    data = [(torch.randn(8, 12, generator=dice), torch.randn(8, 3, generator=dice)) for _ in range(5)]
    mine = slice(me.rank * 8 // me.size, (me.rank + 1) * 8 // me.size)
    for code, compression in COMPRESSIONS.items():
        model = nn.Sequential(
            nn.Linear(12, 200), nn.LayerNorm(200), nn.Linear(200, 70), nn.Tanh(), nn.Linear(70, 3)
        )
        plain = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            adam(plain.parameters()), compression=compression, gather="parameters", bucket_mb=0.01
        )
        for inputs, targets in data:
            optimizer.zero_grad()
            loss_of(plain(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        wanted = optimizer.state_dict()
        job = Job(model, loss_of, lambda rows: iter(data), adam, compression=compression)
        pipeline = pipeline_of(job, stages=1, replicas=me.size)
        for batch in data:
            pipeline.step(batch)
        weights, found = state_of(pipeline), pipeline.optimizers[0].state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value), (code, name)
        assert found["state"].keys() == wanted["state"].keys()
        for number, entries in wanted["state"].items():
            assert found["state"][number].keys() == entries.keys(), (code, number)
            for key, value in entries.items():
                assert torch.equal(found["state"][number][key], value), (code, number, key)
        pipeline.close()
        optimizer.close()


main(__name__)
