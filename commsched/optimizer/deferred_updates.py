"""The wrapped optimizer's update, for some of its parameters at a time.

An optimizer is **separable** if updating its parameters one after the other, each with the hyperparameters at
the time of ``step()``, gives the same as updating them together. Then the update of a bucket can wait until
its gradients have arrived, under the next forward. Every other optimizer runs whole, inside ``step()``, and
runs its closure itself, as often as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.optimizer.pending import ordinary

# Compared by exact type, because a subclass may compute something else.
ELEMENTWISE: set[type[Optimizer]] = {
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax RMSprop Rprop Adagrad Adadelta ASGD".split()
}
_SEPARABLE: set[type[Optimizer]] = {torch.optim.Adafactor, torch.optim.SparseAdam}
if hasattr(torch.optim, "Muon"):
    _SEPARABLE.add(torch.optim.Muon)


def register_separable(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare an optimizer class of your own separable (see this module); usable as a decorator.

    Its ``step(closure)`` must run the closure once, before the update.
    """
    _SEPARABLE.add(cls)
    return cls


def is_separable(cls: type[Optimizer]) -> bool:
    return cls in _SEPARABLE or cls in ELEMENTWISE


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """``cls.step`` without torch's step hooks, which must run once per step, not once per bucket."""
    step = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


class OptimizerView:
    """A second object with the wrapped optimizer's state and settings, to step on other parameter groups.

    The wrapped optimizer itself never shows those groups.
    """

    def __init__(self, optimizer: Optimizer, base: type[Optimizer], state: Any = None) -> None:
        self._step = plain_step(base)
        self._view = base.__new__(base)
        self._view.__dict__.update(optimizer.__dict__)
        # A deferred update must not keep the driver alive: the driver's end applies it.
        self._view.__dict__.pop("_driver", None)
        if state is not None:
            self._view.__dict__["state"] = state

    def step(self, groups: list[dict[str, Any]]) -> None:
        self._view.param_groups = groups
        with plain_math(), ordinary(p for group in groups for p in group["params"]):
            self._step(self._view)


class DeferredUpdate:
    """The update of ``optimizer.step()`` now, to be applied to parameters as their gradients arrive."""

    def __init__(self, optimizer: Optimizer, base: type[Optimizer], params: Sequence[nn.Parameter]) -> None:
        self._view = OptimizerView(optimizer, base)
        self._params = params
        self._groups = [_snapshot(group) for group in optimizer.param_groups]
        self._group_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }

    def __call__(self, indices: Sequence[int]) -> None:
        chosen: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for i in indices:
            number = self._group_of.get(id(self._params[i]))
            if number is not None:
                chosen[number].append(self._params[i])
        groups = [
            {**group, "params": params} for group, params in zip(self._groups, chosen, strict=True) if params
        ]
        if groups:
            self._view.step(groups)


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the hyperparameters: schedulers change them after ``step()``, some of them in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


@contextmanager
def plain_math() -> Iterator[None]:
    """Run an update without the autocast or inference mode of the forward that triggered it."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
