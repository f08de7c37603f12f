"""``master_weights=True``: float32 weights behind half-precision parameters, each rank's for its own shards.

They are part of the optimizer's state, under ``KEY``, once the first update has made them differ from the
parameters. A master is valid as long as it rounds to the parameter: where the parameter got another value
(a broadcast, a loaded model, ``p.mul_()``), that value replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

KEY = "master_weight"
HALVES = (torch.float16, torch.bfloat16)


def check_master_weights(gather: str, params: Sequence[torch.Tensor], planned: bool, included: bool) -> None:
    """Raise for options with which ``master_weights=True`` is not possible."""
    if gather != "parameters":
        raise ValueError(
            "master_weights=True keeps float32 weights for each rank's shards, and with"
            f" gather={gather!r} there are none; use gather='parameters'"
        )
    if not any(param.dtype in HALVES for param in params):
        found = ", ".join(sorted({str(param.dtype) for param in params}))
        raise ValueError(
            "master_weights=True is for float16 and bfloat16 parameters, and these are all"
            f" {found}; leave it out"
        )
    if not planned:
        raise ValueError(
            "master_weights=True needs buckets, and Adasum, compressors of your own, transport='plain' and"
            " parameters on several devices are reduced one by one; leave it out"
        )
    if not included:
        raise ValueError("master_weights=True on a rank outside of process_set, which has no shards")


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
