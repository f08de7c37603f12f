"""Finds code whose host would wait for a GPU, with CPU tensors in the place of the GPU's."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoQuestions(TorchDispatchMode):
    """Fails where the host reads a number from a tensor: on a GPU it would wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"), f"{name} waits"
        return func(*args, **(kwargs or {}))
