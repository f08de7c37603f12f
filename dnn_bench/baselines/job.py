"""A job of a comparison: model, batches and optimizer, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dnn_bench import models


@dataclass(frozen=True)
class Job:
    """One training job; the same in every rank and for every baseline."""

    model: str
    batch: int = 0  # per rank; 0 is the model's default
    shape: dict[str, int] = field(default_factory=dict)
    seed: int = 1
    learning_rate: float = 1e-3
    momentum: float = 0.9
    threads: int = 1
    device: str = "cpu"
    data_dir: str = ""  # images or text; empty for synthetic data

    @property
    def rank_batch(self) -> int:
        return self.batch or models.spec(self.model).batch

    def build_model(self) -> nn.Module:
        """Build the model with the same weights on every rank, without dropout, which would differ by run."""
        torch.manual_seed(self.seed)
        model = models.build(self.model)
        for module in model.modules():
            for name, value in vars(module).items():
                # Layers of libraries drop whole paths or attention weights.
                if isinstance(value, float) and (name == "p" or "drop" in name):
                    setattr(module, name, 0.0)
        return model.to(self.device)

    def build_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=self.momentum)

    def sample(self, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + seed)
        return models.sample_batch(
            self.model, batch, self.device, generator, data_dir=self.data_dir, **self.shape
        )

    def local_batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """The batch a rank repeats while it is timed."""
        return self.sample(self.rank_batch, rank)

    def global_batch(self, step: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """One training step's batch, as the shards of its ranks; every process draws the same."""
        batch = self.sample(size * self.rank_batch, 500 + step)
        inputs, targets = (tensor.split(self.rank_batch) for tensor in batch)
        return list(zip(inputs, targets, strict=True))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return models.loss(self.model, outputs, targets)
