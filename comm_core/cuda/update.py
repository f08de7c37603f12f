"""SGD, Adam and AdamW on parts of flat buffers, one launch for all of a bucket's parts.

Unscaling and clipping are one factor on the device, a step to be skipped is one number there: nothing waits
for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from comm_core.cuda.kernels import update_kernel
from comm_core.cuda.launchers import Launcher, device_number, launcher_for, stream_handle
from comm_core.cuda.memory import DeviceTable
from comm_core.cuda.tables import Region, chunk_table

_ROW = 16  # floats; ``Hyper`` in update.h


@dataclass(frozen=True)
class Hyper:
    """One parameter group's numbers of one step, as the kernels want them."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    one_minus_first: float = 1.0
    second: float = 0.0
    one_minus_second: float = 0.0
    eps: float = 0.0
    shrink: float = 1.0
    sign: float = 1.0
    nesterov: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def sgd(cls, group: Mapping[str, Any], first_step: bool = False) -> Hyper:
        """From a parameter group of ``torch.optim.SGD``."""
        return cls(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            # The first gradient is the momentum, whatever the dampening.
            one_minus_first=1.0 if first_step else 1.0 - float(group["dampening"]),
            sign=-1.0 if group["maximize"] else 1.0,
            nesterov=float(group["nesterov"]),
        )

    @classmethod
    def adam(cls, group: Mapping[str, Any], decoupled: bool) -> Hyper:
        """From a parameter group of ``torch.optim.Adam``, or with ``decoupled`` AdamW."""
        first, second = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        return cls(
            lr=lr,
            weight_decay=0.0 if decoupled else decay,
            momentum=first,
            one_minus_first=1.0 - first,
            second=second,
            one_minus_second=1.0 - second,
            eps=float(group["eps"]),
            shrink=1.0 - lr * decay if decoupled else 1.0,
            sign=-1.0 if group["maximize"] else 1.0,
            betas=(first, second),
        )

    def row(self) -> npt.NDArray[np.float32]:
        floats = [self.lr, self.weight_decay, self.momentum, self.one_minus_first, self.second]
        floats += [self.one_minus_second, self.eps, 1.0, self.shrink, self.sign, self.nesterov, 0.0]
        return np.concatenate([np.array(floats, np.float32), np.array(self.betas).view(np.float32)])


@dataclass(frozen=True)
class Part:
    """Flat tensors of equal length: a piece of a gradient, of the weights, and of the optimizer's state.

    State is float32. ``master`` holds the weights where the parameter's own type is too coarse; where
    somebody has written a ``weight`` that it does not round to, that one counts. ``first`` is the momentum
    (None without) or Adam's mean of gradients, ``second`` Adam's mean of their squares. ``steps`` is
    Adam's count, one number on the device, because steps are skipped there.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    master: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    group: int = 0


class ShardUpdate:
    """Updates these parts; the tensors are kept and must stay where they are."""

    def __init__(
        self,
        rule: Literal["sgd", "adam"],
        parts: Sequence[Part],
        groups: int = 1,
        launcher: Launcher | None | Literal["choose"] = "choose",
    ) -> None:
        self.rule, self.parts = rule, list(parts)
        self._steps = [part.steps for part in self.parts if part.steps is not None]
        for number, part in enumerate(self.parts):
            _check(rule, number, part, self.parts[0], groups)
        self._launcher: Launcher | None = None
        if not self.parts:
            return
        self.device = self.parts[0].weight.device
        self._launcher = launcher_for(self.device) if launcher == "choose" else launcher
        if self._launcher is None:
            return
        self._kernel = update_kernel(rule, self.parts[0].grad.dtype, self.parts[0].weight.dtype)
        regions = [Region(i, 0, 0, part.weight.numel()) for i, part in enumerate(self.parts)]
        chunks = torch.from_numpy(chunk_table(regions))
        self._blocks = len(chunks)
        self._chunks = chunks.to(self.device)
        self._parts = torch.tensor([_part_row(part) for part in self.parts], dtype=torch.int64).to(
            self.device
        )
        self._hypers = DeviceTable((groups, _ROW), torch.float32, self.device)

    def __call__(
        self, hypers: Sequence[Hyper], factor: torch.Tensor | None = None, skip: torch.Tensor | None = None
    ) -> None:
        """One step. Gradients count ``factor`` times; nothing happens where ``skip`` is not 0 (each one
        float on the device).
        """
        if not self.parts:
            return
        if self._steps:
            torch._foreach_add_(self._steps, 1.0 if skip is None else (skip == 0).float().reshape(()))
        if self._launcher is None:
            for part in self.parts:
                _STEPS[self.rule](part, hypers[part.group], factor, skip)
            return
        if self._blocks == 0:
            return
        self._hypers.set(np.stack([hyper.row() for hyper in hypers]))
        optional = (0 if tensor is None else tensor.data_ptr() for tensor in (factor, skip))
        arguments = (self._chunks.data_ptr(), self._parts.data_ptr(), self._hypers.address, *optional)
        stream = stream_handle(self.device)
        self._launcher.launch(self._kernel, device_number(self.device), self._blocks, arguments, stream)


def _part_row(part: Part) -> list[int]:
    """``Part`` in update.h."""
    optional = (part.grad, part.weight, part.master, part.first, part.second, part.steps)
    return [*(0 if tensor is None else tensor.data_ptr() for tensor in optional), part.group]


def _check(rule: str, number: int, part: Part, like: Part, groups: int) -> None:
    if rule not in _STEPS:
        raise ValueError(f"there is no rule {rule!r}; the rules are {', '.join(_STEPS)}")
    if rule == "adam" and (part.first is None or part.second is None):
        raise ValueError(f"part {number}: adam needs both means of its state")
    steps, device = part.steps, like.weight.device
    if rule == "adam" and (
        steps is None or steps.numel() != 1 or steps.dtype != torch.float32 or steps.device != device
    ):
        found = "none" if steps is None else f"{tuple(steps.shape)}, {steps.dtype} on {steps.device}"
        raise ValueError(f"part {number}: adam needs a count of steps, one float32 on {device}, got {found}")
    if not 0 <= part.group < groups:
        raise ValueError(f"part {number} is of group {part.group}; there are {groups} groups")
    for name in ("grad", "weight", "master", "first", "second"):
        tensor = getattr(part, name)
        if tensor is None:
            continue
        wanted = getattr(like, name).dtype if name in ("grad", "weight") else torch.float32
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != part.weight.numel():
            raise ValueError(f"part {number}: {name} must be flat with {part.weight.numel()} elements")
        if tensor.dtype != wanted or tensor.device != like.weight.device:
            raise ValueError(
                f"part {number}: {name} must be {wanted} on {like.weight.device}, got {tensor.dtype} on"
                f" {tensor.device}"
            )


# -- the same with torch's operations ------------------------------------------------------------------------


def _gradient(part: Part, hyper: Hyper, factor: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    grad = part.grad.float()
    if factor is not None:
        grad = grad * factor
    return grad * hyper.sign + hyper.weight_decay * weight


def _store(old: torch.Tensor, new: torch.Tensor, skip: torch.Tensor | None) -> None:
    old.copy_(new if skip is None else torch.where(skip != 0, old.to(new.dtype), new))


def _weight(part: Part) -> torch.Tensor:
    written = part.weight.float()
    if part.master is None:
        return written
    return torch.where(part.master.to(part.weight.dtype) == part.weight, part.master, written)


def _sgd(part: Part, hyper: Hyper, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    weight = _weight(part)
    grad = _gradient(part, hyper, factor, weight)
    if part.first is not None:
        first = hyper.momentum * part.first + hyper.one_minus_first * grad
        grad = grad + hyper.momentum * first if hyper.nesterov else first
        _store(part.first, first, skip)
    _store_weight(part, weight - hyper.lr * grad, skip)


def _adam(part: Part, hyper: Hyper, factor: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    assert part.first is not None and part.second is not None and part.steps is not None
    count = part.steps.double()
    rate = (hyper.lr / (1.0 - hyper.betas[0] ** count)).float()
    root_of_bias = (1.0 - hyper.betas[1] ** count).sqrt().float()
    weight = _weight(part) * hyper.shrink
    grad = _gradient(part, hyper, factor, weight)
    first = part.first + hyper.one_minus_first * (grad - part.first)
    second = hyper.second * part.second + hyper.one_minus_second * grad * grad
    _store_weight(part, weight - rate * (first / (second.sqrt() / root_of_bias + hyper.eps)), skip)
    _store(part.first, first, skip)
    _store(part.second, second, skip)


def _store_weight(part: Part, updated: torch.Tensor, skip: torch.Tensor | None) -> None:
    if part.master is not None:
        _store(part.master, updated, skip)
    _store(part.weight, updated, skip)


_STEPS = {"sgd": _sgd, "adam": _adam}
