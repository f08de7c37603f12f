"""Quantised blocks as numpy and torch make them: what quantised gradients must be to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
BLOCK = 256
SMALLEST = np.float32(1e-35)
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
WIRES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def coded(block: Floats, largest: np.float32, code: str) -> tuple[Floats, np.float32]:
    """The elements' codes, as numbers, and their scale."""
    scale = largest / LARGEST[code]
    if code == "int8":
        return np.rint(block * (LARGEST[code] / largest)), scale
    return torch.from_numpy(block / scale).to(torch.float8_e4m3fn).float().numpy(), scale


def rounded(values: Floats, residual: Floats, code: str) -> Floats:
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
            codes, scale = coded(block, largest, code)
            assert (np.abs(codes) <= LARGEST[code]).all()
            result[part] = codes * scale
        residual[part] = block - result[part]
    return result


def sums_of_hosts(data: Sequence[Floats], hosts: Sequence[int]) -> list[Floats]:
    """What is quantised between ``hosts`` (of each rank): their sums, in rank order; else all ranks' data."""
    if len(set(hosts)) < 2:
        return list(data)
    own = [[part for part, of in zip(data, hosts, strict=True) if of == host] for host in sorted(set(hosts))]
    return [reduce(np.add, parts) for parts in own]


def exchanged(
    data: Sequence[Floats],
    sent: Sequence[Floats],
    sums: Floats | None,
    ends: Sequence[int],
    scale: float,
    prescale: float = 1.0,
    *,
    code: str,
    hosts: Sequence[int] = (),
) -> Floats:
    """The sum that every rank gets of every rank's ``data``; ``ends`` of the ranks' parts, ``sums`` of all
    owners. Without ``sums``, each owner's exact sum. ``hosts``: in two tiers; ``sent`` is of each host then.
    """
    data = sums_of_hosts([mine * np.float32(prescale) for mine in data], hosts)
    result = np.zeros_like(data[0])
    for start, stop in zip([0, *ends], ends, strict=False):
        part = slice(start, stop)
        parts = [rounded(mine[part], lost[part], code) for mine, lost in zip(data, sent, strict=True)]
        total = parts[0].copy()
        for other in parts[1:]:
            total += other
        total *= np.float32(scale)
        result[part] = total if sums is None else rounded(total, sums[part], code)
    return result
