"""Optimizers that update whole matrices, with ``gather="parameters"``: each parameter has one owner rank.

Muon, Shampoo and SOAP multiply a gradient by itself, so a rank needs all of it. Each bucket holds the
parameters of rank 0, then those of rank 1 and so on: its reduce-scatter reduces each gradient to its owner,
which updates it, and its all-gather sends the updated parameter to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends.interface import Backend
from commsched.optimizer.whole_step import ELEMENTWISE, register_separable
from scheduler.ir.buckets import Bucket, Piece

Cost = Callable[[Sequence[int]], float]
"""Estimates the work of one update from a parameter's shape; only the ratios count."""

BUCKET_BYTES = 4 << 20
_UNEVEN = 1.5  # a bucket may close once its longest part has at most so many times the mean part's bytes
_LARGEST = 4  # at this many times the wanted bytes it closes in any case


def matrix_products(shape: Sequence[int]) -> float:
    """Return the work of products of a matrix with its own transpose; of a vector, its elements."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, prod(shape))
    return float(prod(shape) * (1 + min(rows, columns)))


def elements(shape: Sequence[int]) -> float:
    return float(prod(shape))


# Compared by exact type, because a subclass may compute something else.
WHOLE: dict[type[Optimizer], Cost] = {torch.optim.Adafactor: elements}
if hasattr(torch.optim, "Muon"):
    WHOLE[torch.optim.Muon] = matrix_products


def register_whole_matrix(cls: type[Optimizer], cost: Cost = matrix_products) -> type[Optimizer]:
    """Declare that an optimizer class of your own updates each parameter by itself, but needs all of it.

    ``cost`` estimates the work of one update from the parameter's shape, so that ranks share it evenly.
    Usable as a decorator.
    """
    WHOLE[cls] = cost
    return register_separable(cls)


def owners_of(cls: type[Optimizer], params: Sequence[nn.Parameter], backend: Backend) -> list[int] | None:
    """Return the owner rank of each parameter; None for optimizers that update every element by itself.

    Collective: raises ``CommError`` unless all ranks find the same owners.
    """
    if cls not in WHOLE or cls in ELEMENTWISE:
        return None
    if not backend.uneven_parts:
        raise ValueError(
            f"gather='parameters' with {cls.__name__} gives each rank whole parameters, and {backend.name}"
            " moves parts of equal length only; use gather='gradients', or transport='direct' on CPUs"
        )
    owners = balanced([WHOLE[cls](p.shape) for p in params], backend.ranks.size)
    digest = hashlib.sha256(str(owners).encode()).hexdigest()[:16]
    backend.ranks.agree("the owners of the parameters", digest, "register the same cost on every rank")
    return owners


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with the least work so far.

    Equal costs are dealt out in turn in backward order, so that neighbours, which share a bucket, have
    different owners.
    """
    owners, load = [0] * len(costs), [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], -i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += costs[i]
    return owners


def whole_buckets(
    sizes: Sequence[int], groups: Sequence[int], owners: Sequence[int], ranks: int, limit: float
) -> list[Bucket]:
    """Return buckets of uncut layers, about ``limit`` bytes each, whose parts are about equally long.

    ``owners`` are the ranks by layer. A bucket whose bytes belong to few ranks uses few of the links.
    """
    buckets: list[Bucket] = []
    filling: dict[int, list[Piece]] = {}
    for layer in reversed(range(len(sizes))):
        if sizes[layer]:
            pieces = filling.setdefault(groups[layer], [])
            pieces.append(Piece(layer, 0, sizes[layer]))
            parts = [0] * ranks
            for piece in pieces:
                parts[owners[piece.layer]] += piece.bytes
            full, even = sum(parts) >= limit, max(parts) * ranks <= _UNEVEN * sum(parts)
            if (full and even) or sum(parts) >= _LARGEST * limit:
                buckets.append(Bucket(tuple(filling.pop(groups[layer])), groups[layer]))
    return buckets + [Bucket(tuple(pieces), group) for group, pieces in filling.items()]
