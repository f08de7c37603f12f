"""``master_weights=True``: float32 weights behind half-precision parameters, each rank's for its own shards.

They are part of the optimizer's state, under ``KEY``, once the first update has made them differ from the
parameters. A master is valid as long as it rounds to the parameter: where the parameter got another value
(a broadcast, a loaded model, ``p.mul_()``), that value replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

KEY = "master_weight"
HALVES = (torch.float16, torch.bfloat16)


def take_written(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Replace the master's elements that do not round to the weight's."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))


def load_unrounded(optimizer: Any, load: Callable[[], None]) -> None:
    """Load a state dict whose tensors keep their type; torch alone rounds them to the parameters' type."""
    given: dict[str, Any] = {}
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
    try:
        load()
    finally:
        hook.remove()
    names = chain.from_iterable(group["params"] for group in given["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = optimizer.__dict__["state"]
    for name, param in zip(names, params, strict=True):
        for key, value in given["state"].get(name, {}).items():
            rounded = state[param][key]
            if isinstance(value, torch.Tensor) and rounded.dtype in HALVES:
                state[param][key] = value.to(rounded.device)


def leaf_on(weight: torch.Tensor, masters: bool) -> nn.Parameter:
    """Return the tensor that the optimizer updates: the weight itself, or a master of it."""
    return nn.Parameter(weight.float() if masters and weight.dtype in HALVES else weight)
