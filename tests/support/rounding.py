"""How far two right ways to compute the same numbers may be apart, whichever kernels a processor picks."""

from __future__ import annotations

import torch


def rounding(dtype: torch.dtype, terms: int, depth: int = 1) -> float:
    """Bound the difference as a share of the largest value.

    A sum of ``terms`` products is off by at most half a last bit for each term, in whatever order and with
    or without fused multiply-adds; two ways are twice that apart. ``depth`` such sums follow each other.
    """
    return terms * depth * torch.finfo(dtype).eps
