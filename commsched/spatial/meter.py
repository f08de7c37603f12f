"""Measure the peak bytes of live tensors by counting storages as they are made and freed, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMeter(TorchDispatchMode):
    """Within ``with PeakMeter() as meter:`` counts storages that operations make; ``meter.peak`` in bytes.

    What existed before (parameters, the input) does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count these tensors, even if operations return them."""
        for tensor in tensors:
            self._track(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):  # inputs of the operation, not made by it
            if isinstance(value, Tensor) and id(value.untyped_storage()) not in self._known:
                self._track(value.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if id(storage) not in self._known:
                    self._track(storage, storage.nbytes())
        return result

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)

        def freed(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
