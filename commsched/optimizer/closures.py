"""Closures given to ``step()`` of optimizers that run them themselves, as often as they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commsched.optimizer.weighted_loss import divide_alone

Closure = Callable[[], Any]


def step_whole(optimizer: Any, closure: Closure) -> Any:
    """Step an optimizer that updates all parameters at once, with gradients reduced each time the closure has
    run.
    """

    def reduced() -> Any:
        with torch.enable_grad():
            loss = closure()
        optimizer._synchronize()
        return loss

    result = optimizer._update(reduced)
    optimizer._synchronized = False
    driver = optimizer._driver  # another one, where parameters were frozen or added since the last step
    if driver is not None:
        driver.gathering.finish_step()
        driver.after_step()
    return result


def dividing(optimizer: Any, closure: Closure) -> Closure:
    """The closure on a rank alone, with gradients divided by the samples of weighted losses."""

    def run() -> Any:
        loss = closure()
        divide_alone(optimizer)
        return loss

    return run
