"""Compares training runs with the plain one."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOSS_TOLERANCE = 1e-2  # of the loss, at any step: rounding grows while training goes on
ACCURACY_TOLERANCE = 0.01


@dataclass(frozen=True)
class Run:
    """One training run; `digest` names its final parameters bit for bit."""

    task: str
    baseline: str
    workers: int
    losses: tuple[float, ...]
    accuracy: float
    digest: str


def mean_losses(ranks: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """The global batch's loss at every step: the mean over equal shards."""
    return tuple(statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True))


def digest(parameters: dict[str, Tensor]) -> str:
    """A short name of the parameters' exact bits."""
    found = hashlib.sha256()
    for name in sorted(parameters):
        found.update(name.encode())
        found.update(parameters[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def deviation(run: Run, plain: Run) -> float:
    """The largest difference of the loss curves, relative to the larger value."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(run.losses, plain.losses, strict=True))


def problems(run: Run, plain: Run) -> list[str]:
    """List how a run differs from plain training by more than rounding."""
    found = []
    if (off := deviation(run, plain)) > LOSS_TOLERANCE:
        found.append(f"its loss differs by {off:.1e} from plain training's")
    if abs(run.accuracy - plain.accuracy) > ACCURACY_TOLERANCE:
        found.append(f"its accuracy is {run.accuracy:.4f}, plain training's {plain.accuracy:.4f}")
    return found
