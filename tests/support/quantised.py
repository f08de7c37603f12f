"""Quantised blocks as numpy and torch make them: what quantised gradients must be to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

from comm_core import quantise_blocks, sum_blocks
from comm_core.cuda import BlockCode, message_bytes

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


def hard_values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Whole blocks of float32 numbers that ``dtype`` has, of all magnitudes; some blocks have subnormals,
    zeros, infinity or NaN, at their edges too, or numbers halfway between two codes.
    """
    dice = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=dice)
    rows = values.view(-1, BLOCK)
    rows *= 2.0 ** torch.randint(-145, 120, (len(rows), 1), generator=dice)
    rows[::2] *= 2.0 ** torch.randint(-18, 1, rows[::2].shape, generator=dice)
    rows[1::4] = torch.randn(rows[1::4].shape, generator=dice)  # in every type's range
    halves = torch.arange(-63.5, 64.5).repeat(2)
    for block, (place, value) in enumerate(
        [
            (0, torch.inf),
            (-1, torch.inf),
            (0, torch.nan),
            (-1, -torch.inf),
            (100, 1e-45),
            (-1, 1e-35),
            (0, 3e38),
        ]
    ):
        rows[37 + block, place] = value
    rows[50], rows[51], rows[52] = 0.0, -0.0, 1e-40
    rows[53], rows[54] = halves, halves / 8
    rows[53, 0], rows[54, -1] = 127.0, -448.0
    rows[55, ::2], rows[55, 1::2] = 0.0, torch.nan
    return values.to(dtype).float()


def _same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Processors have NaNs of different bits."""
    found = found.cpu()
    if found.dtype == torch.float32:
        found, wanted = (each.masked_fill(each.isnan(), torch.nan) for each in (found, wanted))
    return torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def check_codes(
    codes: Sequence[BlockCode], wire: torch.dtype, dtype: torch.dtype, count: int, device: torch.device
) -> None:
    """Three messages of one rank, their sum, and its message: each code makes the engine's bits."""
    lost = hard_values(count, torch.float32, 9).nan_to_num_(0, 0, 0).mul_(1e-3)
    kept = [lost.to(device, copy=True) for _ in codes]
    parts: list[torch.Tensor] = []
    message = torch.empty(message_bytes(count), dtype=torch.uint8, device=device)
    for seed in range(3):
        values = hard_values(count, dtype, seed)
        parts.append(quantise_blocks(values, wire, lost, 1 / 3))
        for code, residual in zip(codes, kept, strict=True):
            code.quantise(values.to(device), residual, message, 1 / 3)
            assert _same_bits(message, parts[-1]) and _same_bits(residual, lost)
    assert lost.isfinite().all() and lost.any()
    wanted = sum_blocks(parts, count, wire, 1 / 3)
    assert wanted.isnan().any() and wanted.view(-1, BLOCK).isfinite().all(1).sum() > count // BLOCK // 4
    for code in codes:
        total = torch.empty(count, device=device)
        code.add_up(torch.cat(parts).to(device), 3, total, 1 / 3)
        assert _same_bits(total, wanted)
        code.quantise(total, None, message)
        assert _same_bits(message, quantise_blocks(wanted, wire))
