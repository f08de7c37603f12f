"""``p.grad`` as torch itself has it: read and written without waiting for what is on its way."""

from __future__ import annotations

import torch
from torch import nn


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    if type(parameter) is nn.Parameter:
        return parameter.grad
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def set_raw_grad(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    if type(parameter) is nn.Parameter:
        parameter.grad = grad
        return
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = grad


def clear_raw_grad(parameter: torch.Tensor, set_to_none: bool) -> bool:
    """What ``Optimizer.zero_grad`` does to one parameter; whether there was a gradient."""
    grad = raw_grad(parameter)
    if grad is None:
        return False
    if set_to_none:
        set_raw_grad(parameter, None)
        return True
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
    return True
