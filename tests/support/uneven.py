"""A model that ranks with different numbers of samples train, beside one that a single process trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import commsched as hvd
from tests.support.oracle import assert_close, batch, release, seeded, terms_of
from tests.support.reference_run import momentum, some_profile
from tests.support.small_models import mlp64

GATHERS = ("gradients", "parameters")


def rows(rank: int, step: int, part: int = 0) -> torch.Tensor:
    """This rank's samples: from 1 to 7 of them."""
    count = 1 + (3 * rank + 2 * step + part) % 7
    return batch(rank, 10 * step + part, (count, 12), torch.float64)


def mean_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Pair:
    """A model on all ranks beside the one that a single process trains with all samples."""

    def __init__(
        self, build: Any = mlp64, make: Any = momentum, planned: bool = True, **options: Any
    ) -> None:
        self.model, self.plain = seeded(build), seeded(build)
        self.alone = make(self.plain)
        if planned:
            options["profile"] = some_profile(self.model)
        options = {"schedule": "dear", "bucket_mb": 0.002, **options}
        self.optimizer: Any = hvd.DistributedOptimizer(
            make(self.model), self.model.named_parameters(), **options
        )
        self.steps = 0

    def backward(self, mine: torch.Tensor, everybody: list[torch.Tensor]) -> None:
        self.optimizer.weighted(mean_loss(self.model, mine), len(mine)).backward()
        self.together(everybody)

    def together(self, everybody: list[torch.Tensor]) -> None:
        self.alone.zero_grad()
        mean_loss(self.plain, torch.cat(everybody)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.alone.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def compare(self, what: str) -> None:
        assert_close(self.model, self.plain, terms_of(self.plain, self.steps + 1), what)

    def end(self, what: str) -> None:
        self.compare(what)
        release(self.optimizer)
