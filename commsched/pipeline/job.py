"""Jobs for the command line: a user's function makes model, loss and batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from commsched.pipeline.stage import Loss
from commsched.pipeline.update import Factory

Batches = Callable[[int], Iterator[tuple[Any, Any]]]
"""Rows of a batch -> batches without end, the same on every rank."""


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


class Job(NamedTuple):
    """``loss(outputs, targets)`` is a mean over rows; ``optimizer`` makes an optimizer of parameters."""

    model: nn.Module
    loss: Loss
    batches: Batches
    optimizer: Factory = _sgd


def load_job(text: str) -> Job:
    """Call ``module:function``, which returns a ``Job`` or a tuple of its fields."""
    module, _, function = text.partition(":")
    if not module or not function:
        raise ValueError(f"--job must look like package.module:function, got {text!r}")
    # Scripts of the user's lie where the command is called.
    sys.path.insert(0, "")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--job {text}: {error}") from None
    finally:
        sys.path.remove("")
    made = make()
    if not isinstance(made, tuple) or not 3 <= len(made) <= 4 or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"--job {text}: the function must return (model, loss, batches) or (model, loss, batches,"
            f" optimizer), got {type(made).__name__}"
        )
    return Job(*made)
