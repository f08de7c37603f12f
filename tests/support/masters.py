"""What ``master_weights=True`` promises, in one process: a float32 copy learns, parameters are cast from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class CastEachStep:
    """An optimizer over float32 copies of these parameters; to ``Oracle`` it looks like theirs."""

    def __init__(self, params: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], Any]) -> None:
        self.weights = list(params)
        self.copies = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.inner = make(self.copies)
        self.param_groups = [{"params": self.weights}]
        self.factor = torch.ones(())

    def step(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float() * self.factor
        self.inner.step()
        self.cast()

    def cast(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.data.copy_(copy.detach())

    def norm(self) -> torch.Tensor:
        """The norm of all gradients, in float64."""
        grads = [p.grad.double().flatten() for p in self.weights if p.grad is not None]
        return torch.linalg.vector_norm(torch.cat(grads))

    def clip(self, bound: float, norm: torch.Tensor) -> None:
        """Scale the next step's gradients to this bound, given their norm."""
        self.factor = torch.clamp(bound / (norm + 1e-6), max=1.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None
