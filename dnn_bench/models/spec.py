"""What the registry says about a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelSpec:
    """One model: `builder`, a function or "file.function" in this package, is called with `options`.

    `task` says what a batch looks like and which loss belongs to it; `shape` holds the sizes a batch needs;
    `batch` is the default per worker.
    """

    builder: str | Callable[..., nn.Module]
    task: str
    batch: int
    shape: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
