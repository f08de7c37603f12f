"""Three steps of training over two tiers, which rank 0 compares with the oracle bit for bit."""

from __future__ import annotations

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.private_groups import hosts_of
from tests.support.oracle import assert_same_bits, batch, fingerprint, seeded
from tests.support.reference_run import momentum, some_profile
from tests.support.two_tiers import TierOracle

STEPS = 3


def model() -> nn.Module:
    """Its parameters do not divide by the number of ranks."""
    return nn.Sequential(nn.Linear(12, 37), nn.ReLU(), nn.Linear(37, 11), nn.ReLU(), nn.Linear(11, 1))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    ours = seeded(model)
    options = {"schedule": "dear", "bucket_mb": 0.001, "profile": some_profile(ours)}
    optimizer = hvd.DistributedOptimizer(momentum(ours), ours.named_parameters(), **options)
    explanation = hvd.explain(optimizer, show=False)
    for step in range(STEPS):
        loss(ours, hvd.rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    optimizer.close()
    assert len(set(hvd.allgather_object(fingerprint(ours)))) == 1
    if hvd.rank() == 0:
        truth = seeded(model)
        oracle = TierOracle(truth, momentum(truth), hvd.size())
        for step in range(STEPS):
            oracle.step(lambda m, rank, step=step: loss(m, rank, step))
        assert_same_bits(ours, truth)
        assert not torch.equal(next(seeded(model).parameters()), next(ours.parameters()))  # it has trained
        print(f"{hvd.size()} ranks on {len(set(hosts_of()))} hosts over {explanation.transport}", flush=True)


main()
