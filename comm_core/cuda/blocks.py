"""Quantises float32 tensors on their device: bytes, sums and residuals have the bits of the engine's."""

from __future__ import annotations

from typing import Literal

import torch

from comm_core.cuda.launchers import Launcher, current_stream, device_number, launcher_for
from comm_core.cuda.tables import BLOCK, BLOCK_BYTES, CODES, THREADS

_LARGEST = {torch.int8: 127.0}
"""The number that a block's largest element becomes: 448 for fp8."""

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000  # bits of float32
_ROUNDER = 12582912.0  # see Int8Code in block_codes.h
_SMALLEST = 1e-35
_BLOCKS_OF_A_LAUNCH = THREADS // 32  # a warp has a block


class BlockCode:
    """int8 or fp8, for flat tensors of one or more whole blocks, whose bytes block_codes.h describes.

    Kernels and torch's operations run on the current stream.
    """

    def __init__(
        self,
        wire_dtype: torch.dtype,
        device: torch.device,
        launcher: Launcher | None | Literal["choose"] = "choose",
    ) -> None:
        self._wire, self._name = wire_dtype, CODES[wire_dtype]
        self._launcher = launcher_for(device) if launcher == "choose" else launcher
        # A tensor on the device: torch's GPU kernels multiply by the inverse of other divisors.
        self._largest = torch.full((1,), _LARGEST.get(wire_dtype, 448.0), dtype=torch.float32, device=device)

    def quantise(
        self, values: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, scale: float = 1.0
    ) -> None:
        """Write the bytes of ``values * scale + residual``, and into ``residual`` what rounding lost."""
        blocks = _blocks(values, out, 1)
        if residual is not None:
            _blocks(residual, out, 1)
        if self._launcher is None:
            self._quantise_by_torch(values, residual, out, scale)
        else:
            lost = 0 if residual is None else residual.data_ptr()
            self._launch("quantise", (values.data_ptr(), lost, out.data_ptr(), blocks, float(scale)))

    def add_up(self, parts: torch.Tensor, number: int, out: torch.Tensor, scale: float = 1.0) -> None:
        """Write ``scale`` times the sum of ``number`` parts, which follow each other, in their order."""
        blocks = _blocks(out, parts, number)
        if self._launcher is None:
            self._add_up_by_torch(parts, number, out, scale)
        else:
            self._launch("sum", (parts.data_ptr(), number, out.data_ptr(), blocks, float(scale)))

    def _launch(self, kernel: str, arguments: tuple[int, int, int, int, float]) -> None:
        assert self._launcher is not None
        device, launched = self._largest.device, -(-arguments[3] // _BLOCKS_OF_A_LAUNCH)
        stream = current_stream(device)
        where = int(stream.cuda_stream) if stream else 0
        self._launcher.launch(f"{kernel}_{self._name}", device_number(device), launched, arguments, where)

    def _quantise_by_torch(
        self, values: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, scale: float
    ) -> None:
        rows = values.view(-1, BLOCK) * scale
        if residual is not None:
            rows = rows + residual.view(-1, BLOCK)
        sizes = rows.view(torch.int32).bitwise_and(_MAGNITUDE)
        most = sizes.amax(1, keepdim=True)
        magnitude, finite = most.view(torch.float32), most < _INFINITY
        zero = magnitude < _SMALLEST
        steps = torch.where(zero, 0.0, magnitude / self._largest).masked_fill_(~finite, float("nan"))
        if self._wire == torch.int8:
            sums = rows * (self._largest / magnitude) + _ROUNDER
            codes, rounded = sums.view(torch.int32).to(torch.uint8), sums - _ROUNDER
        else:
            small = (rows / (magnitude / self._largest)).to(self._wire)
            codes, rounded = small.view(torch.uint8), small.float()
        codes = torch.where(finite, codes.masked_fill(zero, 0), (sizes != 0).to(torch.uint8))
        if residual is not None:
            lost, kept = rows - rounded.masked_fill_(zero, 0.0) * steps, residual.view(-1, BLOCK)
            kept.copy_(torch.where(finite, lost, kept))
        torch.cat([steps.view(torch.uint8), codes], 1, out=out.view(-1, BLOCK_BYTES))

    def _add_up_by_torch(self, parts: torch.Tensor, number: int, out: torch.Tensor, scale: float) -> None:
        restored = map(self._restored, parts.view(number, -1, BLOCK_BYTES))
        total = next(restored)
        for part in restored:
            total = total + part
        torch.mul(total.view(-1), scale, out=out)

    def _restored(self, blocks: torch.Tensor) -> torch.Tensor:
        steps, codes = blocks[:, :4].contiguous().view(torch.float32), blocks[:, 4:].contiguous()
        values = codes.view(self._wire).float() * steps
        return torch.where(steps.isnan(), torch.where(codes == 0, 0.0, steps), values)


def message_bytes(elements: int) -> int:
    """Return the bytes that stand for so many elements of whole blocks."""
    return elements // BLOCK * BLOCK_BYTES


def _blocks(values: torch.Tensor, message: torch.Tensor, parts: int) -> int:
    """Return the number of whole blocks of values, of which the message holds so many parts."""
    for tensor, dtype in ((values, torch.float32), (message, torch.uint8)):
        if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"expected a flat contiguous tensor of {dtype}, got {tensor.dtype}")
    numel = values.numel()
    if numel % BLOCK or message.numel() != parts * message_bytes(numel):
        raise ValueError(
            f"expected blocks of {BLOCK} elements and {parts} parts of {BLOCK_BYTES} bytes for each, got"
            f" {numel} elements and {message.numel()} bytes"
        )
    return numel // BLOCK
