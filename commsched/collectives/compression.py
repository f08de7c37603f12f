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


class Int8Compressor(Compressor):
    """Sends large float32 gradients in blocks of int8 with one scale, and makes up for the rounding later.

    For ``DistributedOptimizer`` only, which keeps what rounding has lost from one step to the next.
    """

    wire_dtype = torch.int8

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        raise ValueError(
            "Compression.int8 is for the buckets of DistributedOptimizer, and a collective by itself keeps no"
            " residual; use Compression.fp16, bf16 or none here"
        )


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
