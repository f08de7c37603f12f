"""The arguments of ``DistributedOptimizer``, checked: each raises ``ValueError`` where it cannot be."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends import PLAIN, wanted_transport
from commsched.collectives.compression import Compression
from commsched.collectives.reductions import Adasum, Average, Sum
from commsched.optimizer.sharded_step import HALVES
from scheduler.ir.program import Program


@dataclass
class Options:
    """The arguments that a driver needs."""

    process_set: Any
    sums: bool = False
    predivide: float = 1.0
    wire_dtype: torch.dtype | None = None
    schedule: str | Program = "auto"
    gather: str = "gradients"
    early_step: bool = False
    master_weights: bool = False
    transport: str | None = None
    bucket_bytes: int | None = None
    profile: Any = None
    groups: list[list[int]] | None = None
    sparse_as_dense: bool = False
    row_sparse: bool | str = "auto"

    def for_other_params(self, before: Sequence[nn.Parameter], now: Sequence[nn.Parameter]) -> Options:
        """Return the options for other parameters, without the program or profile of these."""
        index = {id(param): i for i, param in enumerate(now)}
        groups = [[index[id(before[i])] for i in g if id(before[i]) in index] for g in self.groups or []]
        schedule = self.schedule if isinstance(self.schedule, str) else "auto"
        return replace(self, schedule=schedule, profile=None, groups=[g for g in groups if g] or None)


# -- named_parameters=, groups= ------------------------------------------------------------------------------


def checked_names(param_groups: list[dict[str, Any]], named: Sequence[Any] | None) -> dict[Any, str]:
    """Return a name for each parameter; unnamed and duplicate ones are refused, as in Horovod."""
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
    groups = num_groups if groups is None else groups
    if groups == 0:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must not be negative, got {groups}")
        count = min(groups, len(params))
        return [list(range(len(params) * k // count, len(params) * (k + 1) // count)) for k in range(count)]
    index = {id(param): i for i, param in enumerate(params)}
    indices = [[index[id(tensor)] for tensor in group if id(tensor) in index] for group in groups]
    twice = [i for i, count in Counter(i for group in indices for i in group).items() if count > 1]
    if twice:
        raise ValueError(
            f"groups must not share a tensor, but {len(twice)} tensors are in several (first: {twice[0]})"
        )
    return [group for group in indices if group]


# -- op=, gradient_predivide_factor=, bucket_mb= -------------------------------------------------------------


def is_sum(op: Any, predivide: float) -> bool:
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be commsched.Average, Sum or Adasum, got {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor is for op=Average, got op={op!r} with a factor of {predivide}"
        )
    return bool(op == Sum)


def in_bytes(bucket_mb: float | None) -> int | None:
    if bucket_mb is None:
        return None
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, got {bucket_mb}")
    return round(bucket_mb * 2**20)


# -- what needs buckets --------------------------------------------------------------------------------------

_ONE_BY_ONE = (
    "Adasum, compressors of your own, transport='plain' and parameters on several devices"
    " are reduced one by one"
)


def needs_plain(optimizer: Optimizer, compression: Any, op: Any, transport: str | None) -> bool:
    """Return whether gradients must be reduced one by one at step time, because buckets cannot carry them."""
    own_compressor = compression is not Compression.none and not hasattr(compression, "wire_dtype")
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    elsewhere = len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices)
    return bool(op == Adasum or own_compressor or elsewhere or wanted_transport(transport) == PLAIN)


def tell_ignored(gather: str, early_step: bool) -> None:
    """Warn of arguments without effect where gradients are reduced one by one."""
    ignored = [f"gather={gather!r}"] * (gather != "gradients") + ["early_step=True"] * early_step
    if ignored:
        warnings.warn(
            f"{' and '.join(ignored)} without effect: {_ONE_BY_ONE}, and every rank keeps all of the"
            " optimizer's state",
            stacklevel=3,
        )


def checked_row_sparse(value: bool | str, one_by_one: bool) -> bool | str:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(f"row_sparse must be 'auto', True or False, got {value!r}")
    if value is True and one_by_one:
        raise ValueError(f"row_sparse=True needs buckets, but {_ONE_BY_ONE}; use row_sparse='auto'")
    return value


def check_master_weights(gather: str, params: Sequence[torch.Tensor], planned: bool, included: bool) -> None:
    """Raise for options with which ``master_weights=True`` is not possible."""
    if gather != "parameters":
        raise ValueError(
            "master_weights=True keeps float32 weights for each rank's shards, and with"
            f" gather={gather!r} there are none; use gather='parameters'"
        )
    if not any(param.dtype in HALVES for param in params):
        dtypes = ", ".join(sorted({str(param.dtype) for param in params}))
        raise ValueError(
            "master_weights=True is for float16 and bfloat16 parameters, and these are all"
            f" {dtypes}; leave it out"
        )
    if not planned:
        raise ValueError(f"master_weights=True needs buckets, and {_ONE_BY_ONE}; leave it out")
    if not included:
        raise ValueError("master_weights=True on a rank outside of process_set, which has no shards")


def transport_for_blocks(code: str, transport: Any, params: Sequence[torch.Tensor], one_by_one: bool) -> Any:
    """Return the transport for buckets quantised to a code, or raise where nothing can move them."""
    refused = f"compression=Compression.{code} is not possible"
    elsewhere = sorted({param.device.type for param in params} - {"cpu"})
    if elsewhere:
        raise ValueError(
            f"{refused} for parameters on {', '.join(elsewhere)}: gradients are quantised on CPUs only; use"
            " Compression.fp16 or bf16"
        )
    if one_by_one:
        raise ValueError(
            f"{refused} without buckets, and Adasum and transport='plain' reduce gradients one by one; use"
            " another compression, or op=Average or Sum over transport='direct'"
        )
    named = transport is None or isinstance(transport, str)  # else it is a backend
    wanted = wanted_transport(transport) if named else transport.name
    if wanted not in (None, "auto", "direct", "gloo"):
        raise ValueError(
            f"{refused} over transport {wanted!r}, because each gradient must be rounded once and summed by"
            " its owner; use transport='direct' or 'gloo'"
        )
    return "direct" if wanted in (None, "auto") else transport
