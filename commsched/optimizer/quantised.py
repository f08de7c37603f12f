"""``Compression.int8`` and ``fp8``: which gradients travel in blocks of bytes, and where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commsched.backends import wanted_transport

BLOCK = 256  # elements with one scale: comm_core's kQuantBlock
SHARE = (BLOCK + 4) / (4 * BLOCK)  # of float32's bytes

# Smaller tensors, and those of one dimension (norms, biases), are few bytes and travel as they are.
_FEWEST = 2048
_TRANSPORTS = (None, "auto", "direct", "gloo")


def travels_quantised(param: torch.Tensor) -> bool:
    return param.dtype == torch.float32 and param.dim() > 1 and param.numel() >= _FEWEST


def transport_for_blocks(code: str, transport: Any, params: Sequence[torch.Tensor], one_by_one: bool) -> Any:
    """Return the transport for buckets quantised to a code, or raise where nothing can move them."""
    refused = f"compression=Compression.{code} is not possible"
    elsewhere = sorted({param.device.type for param in params} - {"cpu"})
    if elsewhere:
        raise ValueError(
            f"{refused} for parameters on {', '.join(elsewhere)}: gradients are quantised on CPUs only; use"
            " Compression.fp16 or bf16"
        )
    if one_by_one:
        raise ValueError(
            f"{refused} without buckets, and Adasum and transport='plain' reduce gradients one by one; use"
            " another compression, or op=Average or Sum over transport='direct'"
        )
    wanted = (
        wanted_transport(transport) if transport is None or isinstance(transport, str) else transport.name
    )
    if wanted not in _TRANSPORTS:
        raise ValueError(
            f"{refused} over transport {wanted!r}, because each gradient must be rounded once and summed by"
            " its owner; use transport='direct' or 'gloo'"
        )
    return "direct" if wanted in (None, "auto") else transport
