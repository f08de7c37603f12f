"""The codes of quantised blocks, byte by byte, beside torch's."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from comm_core import EngineError, quantise_blocks, sum_blocks
from tests.support.quantised import BLOCK, LARGEST, WIRES, Floats, rounded

FP8 = torch.float8_e4m3fn
EVERY = torch.arange(256, dtype=torch.uint8)
FINITE = EVERY[~EVERY.view(FP8).float().isnan()]


def block_of(scale: float, codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.frombuffer(bytearray(struct.pack("f", scale)), dtype=torch.uint8), codes])


def parts_of(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of whole blocks."""
    rows = blocks.view(-1, BLOCK + 4)
    return rows[:, :4].contiguous().view(torch.float32), rows[:, 4:]


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("scale", [1.0, 0.37, -2.0, 1e-30])
def test_every_code_decodes_like_torch(scale: float) -> None:
    """NaN is no code of a block: there the scale is NaN."""
    found = sum_blocks([block_of(scale, FINITE)], len(FINITE), FP8)
    assert len(FINITE) == 254 and same_bits(found, FINITE.view(FP8).float() * scale)
    whole = sum_blocks([block_of(scale, EVERY)], 256, torch.int8)
    assert same_bits(whole, EVERY.view(torch.int8).float() * scale)


@pytest.mark.parametrize("largest", [448.0, 1.0, 3e-3, 7e30, 2e-35])
def test_numbers_encode_like_torch(largest: float) -> None:
    """Random ones of all magnitudes, the codes themselves, the halves between two codes, and their
    neighbours, of both signs.
    """
    steps = FINITE[:127].view(FP8).float()
    halves = (steps[1:] + steps[:-1]) / 2
    marks = torch.cat(
        [steps, halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(500.0))]
    )
    dice = torch.Generator().manual_seed(0)
    random = torch.randn(100_000, generator=dice) * 2.0 ** torch.randint(-40, 1, (100_000,), generator=dice)
    values = torch.cat([marks, -marks, random.clamp(-1, 1) * 448])
    rows = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1))).view(-1, BLOCK - 1)
    rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], 1) * (largest / 448)
    scales, codes = parts_of(quantise_blocks(rows.flatten(), FP8))
    assert same_bits(scales, rows.abs().amax(1, True) / 448)
    assert same_bits(codes, (rows / scales).to(FP8))
    assert len(codes.unique()) == 254


@pytest.mark.parametrize("code", WIRES)
def test_flushing_subnormals_changes_no_code(code: str) -> None:
    """Small codes of fp8 are not decoded through subnormal floats, which threads may have switched off."""
    values = torch.linspace(-1, 1, 4 * BLOCK) ** 9
    blocks = quantise_blocks(values, WIRES[code])
    wanted = sum_blocks([blocks], len(values), WIRES[code])
    assert torch.set_flush_denormal(True)
    try:
        again = quantise_blocks(values, WIRES[code])
        found = sum_blocks([again], len(values), WIRES[code])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(again, blocks) and same_bits(found, wanted)


@pytest.mark.parametrize("code", WIRES)
@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 700])
def test_residuals_are_what_the_bytes_lack(code: str, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    residual = torch.linspace(-0.1, 0.1, count)
    lost: Floats = residual.numpy().copy()
    wanted = rounded(values.numpy(), lost, code) if count else values.numpy()
    blocks = quantise_blocks(values, WIRES[code], residual)
    np.testing.assert_array_equal(sum_blocks([blocks], count, WIRES[code]).numpy(), wanted)
    np.testing.assert_array_equal(residual.numpy(), lost)
    assert len(blocks) == count + 4 * -(-count // BLOCK)


def test_the_worst_loss_of_an_element_is_as_documented() -> None:
    """int8: half a step of largest / 127. fp8: 2^-4 of the element, down to 2^-6 / 448 of the largest."""
    values = (torch.linspace(-1, 1, 100 * BLOCK) ** 3).view(-1, BLOCK)
    values[:, 0] = 1
    lost = {}
    for code, wire in WIRES.items():
        residual = torch.zeros(values.numel())
        quantise_blocks(values.flatten(), wire, residual)
        lost[code] = residual.view_as(values).abs()
        assert lost[code][:, 0].max() == 0, f"{LARGEST[code]} stands for the largest"
    assert lost["int8"].max() <= 0.5001 / 127
    normal = values.abs() >= 2.0**-6 / 448
    assert (lost["fp8"] <= values.abs() * 1.0001 / 16)[normal].all()
    assert lost["fp8"][~normal].max() <= 2.0**-10 / 448 * 1.0001


def some_values(count: int) -> torch.Tensor:
    """All magnitudes: subnormal, huge, and blocks with infinity and NaN."""
    dice = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=dice)
    rows = values[: count // BLOCK * BLOCK].view(-1, BLOCK)
    rows *= 2.0 ** torch.randint(-140, 120, (len(rows), 1), generator=dice)
    rows[::2] *= 2.0 ** torch.randint(-12, 1, rows[::2].shape, generator=dice)
    if count > 20 * BLOCK:
        rows[3, 5], rows[7, 9], rows[11] = float("inf"), float("nan"), 0.0
    return values


@pytest.mark.parametrize("code", WIRES)
@pytest.mark.parametrize("count", [1, 7, 255, 257, 1000 * BLOCK + 13])
def test_every_instruction_set_gives_the_same_bits(code: str, count: int) -> None:
    """Ranks may have different processors. A fused multiply-add would show in the residuals."""
    values, wire = some_values(count), WIRES[code]
    lost = [some_values(count).roll(1).mul_(0.01).nan_to_num_(0, 0, 0) for _ in range(2)]
    blocks = [
        quantise_blocks(values, wire, residual, 1 / 3, baseline)
        for residual, baseline in zip(lost, (True, False), strict=True)
    ]
    assert same_bits(*blocks) and same_bits(*lost)
    other = quantise_blocks(values.flip(0), wire)
    assert same_bits(other, quantise_blocks(values.flip(0), wire, baseline=True))
    sums = [sum_blocks([blocks[0], other, other], count, wire, 1 / 3, baseline) for baseline in (True, False)]
    assert same_bits(*sums)


def test_what_is_refused() -> None:
    with pytest.raises(EngineError, match=r"wire_dtype=torch.int8 or torch.float8_e4m3fn"):
        quantise_blocks(torch.zeros(3), torch.bfloat16)
    with pytest.raises(EngineError, match="a flat contiguous tensor of float32"):
        quantise_blocks(torch.zeros(3, dtype=torch.float64), FP8)
    with pytest.raises(EngineError, match="a residual like the values"):
        quantise_blocks(torch.zeros(3), FP8, torch.zeros(2))
    with pytest.raises(EngineError, match="at least one part"):
        sum_blocks([], 3, FP8)
    with pytest.raises(EngineError, match="parts of the same elements"):
        sum_blocks([torch.zeros(6, dtype=torch.uint8)], 3, FP8)
