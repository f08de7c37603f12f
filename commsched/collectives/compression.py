"""Compress tensors for communication: the types of Horovod's ``Compression`` namespace."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Compresses tensors before a collective and restores its result; subclass it for another scheme."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    wire_dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        small = tensor.to(cls.wire_dtype) if tensor.dtype.is_floating_point else tensor
        return small, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors as bfloat16, which has the range of float32: nothing overflows."""

    wire_dtype = torch.bfloat16


_FP8 = getattr(torch, "float8_e4m3fn", None)  # None where torch has no such type
_CODES = {torch.int8: "int8", _FP8: "fp8"}


def block_code(wire_dtype: torch.dtype | None) -> str:
    """Return what gradients are quantised to, int8 or fp8; "" where they are not quantised."""
    return _CODES.get(wire_dtype, "") if wire_dtype is not None else ""


class QuantisedCompressor(Compressor):
    """Sends large float32 gradients in blocks of bytes with one scale, and makes up for the rounding later.

    For ``DistributedOptimizer`` only, which keeps what rounding has lost from one step to the next.
    """

    wire_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise ValueError(
            f"Compression.{block_code(cls.wire_dtype)} is for the buckets of DistributedOptimizer, and a"
            " collective by itself keeps no residual; use Compression.fp16, bf16 or none here"
        )


class Int8Compressor(QuantisedCompressor):
    """Bytes are whole numbers from -127 to 127: uniform steps."""

    wire_dtype = torch.int8


class FP8Compressor(QuantisedCompressor):
    """Bytes are ``torch.float8_e4m3fn``: steps in proportion to the element."""

    if _FP8 is not None:
        wire_dtype = _FP8


class _WithFP8:
    """``Compression.fp8``, where torch has the type."""

    def __get__(self, instance: object, owner: type) -> type[FP8Compressor]:
        if not hasattr(torch, "float8_e4m3fn"):
            raise AttributeError(
                f"Compression.fp8 needs torch.float8_e4m3fn, which torch {torch.__version__} does not have;"
                " use Compression.int8 or another torch"
            )
        return FP8Compressor


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    fp8 = _WithFP8()
