"""Blocks of int8 as numpy makes them: what quantised gradients must be to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
BLOCK = 256
SMALLEST = np.float32(1e-35)


def rounded(values: Floats, residual: Floats) -> Floats:
    """What the others get for these values; the residual, which was added to them, becomes the new one."""
    total, result = values + residual, np.zeros_like(values)
    for begin in range(0, len(values), BLOCK):
        block = total[begin : begin + BLOCK]
        part = slice(begin, begin + len(block))
        largest = np.abs(block).max()
        if not np.isfinite(largest):
            result[part] = np.where(block == 0, np.float32(0), np.float32(np.nan))
            continue
        if largest >= SMALLEST:
            codes = np.rint(block * (np.float32(127) / largest))
            assert (np.abs(codes) <= 127).all()
            result[part] = codes * (largest / np.float32(127))
        residual[part] = block - result[part]
    return result


def exchanged(
    data: Sequence[Floats],
    sent: Sequence[Floats],
    sums: Floats | None,
    ends: Sequence[int],
    scale: float,
    prescale: float = 1.0,
) -> Floats:
    """The sum that every rank gets of every rank's ``data``; ``ends`` of the ranks' parts, ``sums`` of all
    owners. Without ``sums``, each owner's exact sum.
    """
    result = np.zeros_like(data[0])
    for start, stop in zip([0, *ends], ends, strict=False):
        part = slice(start, stop)
        parts = [
            rounded(mine[part] * np.float32(prescale), lost[part])
            for mine, lost in zip(data, sent, strict=True)
        ]
        total = parts[0].copy()
        for other in parts[1:]:
            total += other
        total *= np.float32(scale)
        result[part] = total if sums is None else rounded(total, sums[part])
    return result
