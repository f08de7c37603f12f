"""What a caller asks of a carrier: one collective and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch


class ReduceOp(IntEnum):
    """How a reduction combines the ranks' values; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True)
class Reduction:
    """How to combine: inputs are multiplied by `prescale`, results by `postscale`."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


@dataclass(frozen=True)
class Collective:
    """One call of ``allreduce``, ``allgather``, ``broadcast``, ``alltoall`` or ``reducescatter`` (`kind`).

    `tensors` has one element unless `grouped`. Without a `name` the carrier numbers the call. Only reductions
    have a `reduction`, broadcasts a `root` (a global rank), alltoalls `splits`.
    """

    kind: str
    tensors: Sequence[torch.Tensor]
    name: str | None
    set_id: int
    grouped: bool = False
    inplace: bool = False
    reduction: Reduction | None = None
    root: int = -1
    splits: torch.Tensor | None = None
