"""The arguments of ``DistributedOptimizer``, checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends import PLAIN, wanted_transport
from commsched.collectives.compression import Compression
from commsched.collectives.reductions import Adasum, Average, Sum
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
        place = {id(param): i for i, param in enumerate(now)}
        groups = [[place[id(before[i])] for i in g if id(before[i]) in place] for g in self.groups or []]
        schedule = self.schedule if isinstance(self.schedule, str) else "auto"
        return replace(self, schedule=schedule, profile=None, groups=[g for g in groups if g] or None)


def needs_plain(optimizer: Optimizer, compression: Any, op: Any, transport: str | None) -> bool:
    """Return whether gradients must be reduced one by one at step time, because buckets cannot carry them."""
    one_by_one = compression is not Compression.none and not hasattr(compression, "wire_dtype")
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    elsewhere = len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices)
    return bool(op == Adasum or one_by_one or elsewhere or wanted_transport(transport) == PLAIN)


def checked_row_sparse(value: bool | str, one_by_one: bool) -> bool | str:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(f"row_sparse must be 'auto', True or False, got {value!r}")
    if value is True and one_by_one:
        raise ValueError(
            "row_sparse=True needs buckets, but Adasum, compressors of your own, transport='plain' and"
            " parameters on several devices are reduced one by one; use row_sparse='auto'"
        )
    return value


def tell_ignored(gather: str, early_step: bool) -> None:
    """Warn of arguments without effect where gradients are reduced one by one."""
    ignored = [f"gather={gather!r}"] * (gather != "gradients") + ["early_step=True"] * early_step
    if ignored:
        warnings.warn(
            f"{' and '.join(ignored)} without effect: Adasum, compressors of your own, transport='plain' and"
            " parameters on several devices are reduced one by one, and every rank keeps all of the"
            " optimizer's state",
            stacklevel=3,
        )


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
