"""Jobs for the command line: a model, its loss and optimizer, and batches or data sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from commsched.collectives.compression import Compression
from commsched.pipeline.shares import Count
from commsched.pipeline.stage import Loss
from commsched.pipeline.update import Factory

Batches = Callable[[int], Iterator[tuple[Any, Any]]]
"""Rows of a batch -> batches without end, the same on every rank."""


@dataclass(frozen=True)
class Measure:
    """``count(outputs, targets)``: a vector of counts of these rows, which add up over batches and ranks.
    ``scores`` of the sum, by name.
    """

    count: Callable[[Any, Any], Tensor]
    scores: Callable[[Tensor], dict[str, float]]


class Data(NamedTuple):
    """Data sets of ``(input, target)`` rows, and how the test data are scored."""

    train: Dataset[Any]
    test: Dataset[Any] | None = None
    measure: Measure | None = None


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Job:
    """``loss(outputs, targets)`` is a mean over rows, or with ``count(targets)`` a sum over so many terms;
    ``optimizer`` makes an optimizer of parameters. With ``data``, each rank reads its own rows, and training
    goes by epochs. ``master_weights`` and ``compression`` are those of `Pipeline`.
    """

    model: nn.Module
    loss: Loss
    batches: Batches
    optimizer: Factory = _sgd
    data: Data | None = None
    count: Count | None = None
    master_weights: bool = False
    compression: Any = field(default_factory=lambda: Compression.none)


def load_function(text: str, option: str) -> Callable[..., Any]:
    """The function ``module:function``; ``option`` is the one that names it, for errors."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise ValueError(f"{option} must look like package.module:function, got {text!r}")
    # Scripts of the user's lie where the command is called.
    sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {text}: {error}") from None
    finally:
        sys.path.remove("")
    return found


def load_job(text: str) -> Job:
    """Call ``module:function``, which returns a ``Job`` or a tuple of its fields."""
    made = load_function(text, "--job")()
    if isinstance(made, Job):
        return made
    if not isinstance(made, tuple) or not 3 <= len(made) <= 6 or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"--job {text}: the function must return (model, loss, batches), also with an optimizer, data and"
            f" count after them, got {type(made).__name__}"
        )
    return Job(*made)
