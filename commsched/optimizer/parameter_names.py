"""Names of an optimizer's parameters, and Horovod's checks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def checked_names(param_groups: list[dict[str, Any]], named: Sequence[Any] | None) -> dict[Any, str]:
    """Return a name for each parameter; ``ValueError`` for unnamed and duplicate ones, as in Horovod."""
    params = [param for group in param_groups for param in group["params"]]
    if named is None:
        return {param: f"parameter.{number}" for number, param in enumerate(params)}
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(
                "named_parameters must be pairs of a name and a parameter, such as"
                f" model.named_parameters(), got {item!r}"
            )
    repeated = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if repeated:
        raise ValueError(
            "parameter names must differ from each other, but named_parameters repeats"
            f" {', '.join(sorted(repeated))}"
        )
    names = {param: name for name, param in named}
    unnamed = [param for param in params if param not in names]
    if unnamed:
        shapes = ", ".join(str(tuple(param.shape)) for param in unnamed[:5])
        raise ValueError(
            f"named_parameters must name every parameter of the optimizer, but {len(unnamed)} of"
            f" {len(params)} have no name (shapes {shapes}); pass named_parameters=model.named_parameters()"
            " of the whole model"
        )
    return names


def later_names(param_groups: list[dict[str, Any]], names: dict[Any, str]) -> dict[Any, str]:
    """Return the names, with numbers for parameters that were added later."""
    params = [param for group in param_groups for param in group["params"]]
    return names | {p: f"parameter.{i}" for i, p in enumerate(params) if p not in names}


def group_indices(
    param_groups: list[dict[str, Any]], groups: int | Sequence[Sequence[torch.Tensor]] | None, num_groups: int
) -> list[list[int]] | None:
    """Return Horovod's ``groups`` (lists of tensors, or their number) as lists of parameter indices."""
    params = [param for group in param_groups for param in group["params"] if param.requires_grad]
    if groups is None and num_groups:
        groups = num_groups
    if groups is None or groups == 0:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must not be negative, got {groups}")
        count = min(groups, len(params))
        return [list(range(len(params) * k // count, len(params) * (k + 1) // count)) for k in range(count)]
    index = {id(param): i for i, param in enumerate(params)}
    found = [[index[id(tensor)] for tensor in group if id(tensor) in index] for group in groups]
    seen = Counter(i for group in found for i in group)
    twice = [i for i, count in seen.items() if count > 1]
    if twice:
        raise ValueError(
            f"groups must not share a tensor, but {len(twice)} tensors are in several (first: {twice[0]})"
        )
    return [group for group in found if group]
