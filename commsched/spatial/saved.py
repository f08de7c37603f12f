"""Let autograd save a fetched buffer as the tile, which exists anyway, plus the pixels received."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from commsched.spatial.fetch import own_pixels, place
from commsched.spatial.plan import Plan


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs has been changed in "
            f"place: it is at version {tensor._version}, expected {version}"
        )


def _hooks_decide() -> bool:
    """Whether the user's hooks may be active. torch 2.6 cannot tell: autograd keeps whole buffers there."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or bool(top(True))


def compact(
    buffer: Tensor, tile: Tensor, plan: Plan, fill: float, received: list[Tensor]
) -> AbstractContextManager[Any]:
    """Within this context autograd keeps ``buffer`` as a recipe; other tensors as they are.

    If saved-tensor hooks of the user are active (activation checkpointing, offloading), they apply instead.
    """
    if buffer is tile or not torch.is_grad_enabled() or _hooks_decide():
        return nullcontext()
    source, version = tile.detach(), tile._version
    address, shape = buffer.data_ptr(), buffer.shape  # not the buffer itself: autograd keeps these functions

    def rebuilt() -> Tensor:
        _check_version(source, version)
        return place(own_pixels(source, plan, fill), plan, received)

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() == address and tensor.shape == shape:
            return rebuilt
        return tensor.detach(), tensor._version

    def unpack(kept: Any) -> Tensor:
        if not callable(kept):
            _check_version(*kept)
        tensor: Tensor = kept() if callable(kept) else kept[0]
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
