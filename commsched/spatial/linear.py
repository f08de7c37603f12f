"""Linear functions of tensors on several ranks, as autograd functions: each one's gradient is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

_SHARED = 3
TRANSPOSED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
"""By function the one that computes its gradient, from the gradient of its result and its first three further
arguments.
"""


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.function, ctx.args, ctx.count = function, args[:_SHARED], len(args)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return apply(TRANSPOSED[ctx.function], grad, *ctx.args), *(None,) * (1 + ctx.count)


def apply(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``function(x, *args)``, differentiable any number of times."""
    result: Tensor = _Linear.apply(x, function, *args)
    return result
