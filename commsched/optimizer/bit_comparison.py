"""Compares the bits of two tensors, beside each other or one after the other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_HASHED = 1 << 24  # bytes at once


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in the order that they have in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    if one.shape != other.shape or one.stride() != other.stride():
        return False
    return torch.equal(_bytes(one), _bytes(other))


@dataclass(frozen=True)
class Digest:
    """A tensor's shape and strides, and a hash of its bits."""

    shape: torch.Size
    stride: tuple[int, ...]
    hash: bytes

    @staticmethod
    def of(tensor: Tensor) -> Digest:
        found = hashlib.sha256()
        for part in _bytes(tensor).split(_HASHED):
            found.update(part.cpu().numpy())
        return Digest(tensor.shape, tensor.stride(), found.digest())


def has_bits(tensor: Tensor | None, noted: Tensor | Digest | None) -> bool:
    """Return whether a tensor has the bits of another one, which may be gone."""
    if isinstance(noted, Digest):
        return tensor is not None and Digest.of(tensor) == noted
    return same_bits(tensor, noted)
