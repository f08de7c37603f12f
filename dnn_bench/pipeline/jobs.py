"""The registry's models as jobs: ``commsched profile --job dnn_bench.pipeline.jobs:vgg_tiny``.

``paced`` is a model whose layers take the time they are told without using the processor: what a schedule
does can be measured with more ranks than cores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.pipeline import Job
from dnn_bench import models

_DIFFERENT = 4
"""Batches that are made; they come round again, since making them takes time that is not the model's."""


def job_of(name: str, layers: int = 0, **options: Any) -> Job:
    """A model of the registry, or ``paced`` with so many layers."""
    if name == "paced":
        return Job(paced(layers or 8, **options), F.mse_loss, partial(_repeated, _vectors), _sgd)
    batches = partial(_repeated, lambda rows, dice: models.sample_batch(name, rows, generator=dice))
    return Job(models.build(name, **options), partial(models.loss, name), batches, _sgd)


def __getattr__(name: str) -> Callable[[], Job]:
    if "/" not in name and name not in ("paced_job", *models.names()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: job_of("paced" if name == "paced_job" else name)


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.001, momentum=0.9)


def _repeated(sample: Callable[[int, torch.Generator], Any], rows: int) -> Iterator[Any]:
    dice = torch.Generator().manual_seed(17)
    return itertools.cycle([sample(rows, dice) for _ in range(_DIFFERENT)])


# -- layers that sleep ---------------------------------------------------------------------------------------


class _Pause(torch.autograd.Function):
    """Sleep for a given time in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class Paced(nn.Module):
    """Adds a vector; forward, the input's gradient and the weight's each take ``seconds``. The vector is the
    mean of ``height`` ones, which makes the weights as large as is wanted.
    """

    def __init__(self, width: int, seconds: float, height: int) -> None:
        super().__init__()
        self.bias, self.seconds = nn.Parameter(torch.zeros(height, width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = _Pause.apply(self.bias.mean(0), 0.0, self.seconds)
        return _Pause.apply(x, self.seconds, self.seconds if x.requires_grad else 0.0) + weight


def paced(layers: int, width: int = 64, seconds: float = 0.005, height: int = 1) -> nn.Sequential:
    return nn.Sequential(*(Paced(width, seconds, height) for _ in range(layers)))


def _vectors(rows: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64, generator=dice), torch.randn(rows, 64, generator=dice)
