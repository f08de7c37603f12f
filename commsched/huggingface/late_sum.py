"""A sum over all ranks that nobody waits for before it is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_map


class LateSum(torch.Tensor):
    """The sum over all ranks of a whole number, as a float; the first use waits for it.

    Trainer sums the number of tokens before each forward, which divides by it at its end. Waiting for the sum
    at once would let the forward begin behind the gradients or parameters that share the link with it.
    """

    _total: torch.Tensor
    _work: Any

    @staticmethod
    def start(mine: torch.Tensor) -> LateSum:
        """Start to sum. All ranks call this in the same order as other operations of the default group."""
        late = torch.empty(()).as_subclass(LateSum)
        late._total = mine.to(torch.int64)
        late._work = distributed.all_reduce(late._total, async_op=True)
        return late

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_value, args), **tree_map(_value, kwargs or {}))


def _value(item: Any) -> Any:
    if not isinstance(item, LateSum):
        return item
    item._work.wait()
    return item._total / 1
