"""Counts the bytes that weight gradients hold while they wait, beside what the same backward needs unsplit.

A module's input is free behind its whole backward, or behind its weight gradient if that waits. A waiting
weight gradient also holds the gradient of the module's output. Both backwards are compared at each split
module, where both hold the gradients of its output, its input and its weight, too; and behind it, where an
unsplit backward has freed the first and the last. Whatever else the model has saved is the same for both, and
becomes less on the way. Memory that several tensors share counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from commsched.optimizer.split_modules import Call, Input, Part

SHARE = 10
"""Waiting weight gradients may hold one of so many parts of the memory that an unsplit backward needs."""


def default_memory(params: Sequence[Tensor], parts: Sequence[Part]) -> int:
    """Return the bytes that these parts' weight gradients may hold if nobody says."""
    device = params[0].device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // SHARE
    fixed = 2 * sum(p.numel() * p.element_size() for p in params)
    return (fixed + sum(part.kept for part in parts)) // SHARE


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's memory, and its bytes: a view holds all of it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class WaitingMemory:
    """The bytes of one backward, from what its start holds on; and of the same one, were it not split."""

    def __init__(self) -> None:
        self.others = 0  # bytes of the largest gradient of a parameter that is not a split module's weight
        self._inputs: WeakValueDictionary[int, Input] = WeakValueDictionary()
        self.begin()

    def begin(self) -> None:
        """Begin a backward."""
        self._unsplit_freed = self._freed = 0  # of the inputs
        self._unsplit_peak = 0
        self._here = 0  # gradients of the module's input and output
        self._grads: Counter[int] = Counter()  # that wait, by address
        self._grad_bytes = 0

    def joined(self, call: Call) -> None:
        """Note another module that reads its input."""
        place, size = _memory(call.inside)
        call.input = self._inputs.setdefault(place, Input(size))
        call.input.modules += 1
        call.input.weights += 1

    def at(self, call: Call, grad: Tensor) -> None:
        """Note that the backward has come to a module."""
        self._here = _memory(grad)[1] + (call.inside.nbytes if call.inside.requires_grad else 0)
        now = self._here + call.params[0].nbytes - self._unsplit_freed
        self._unsplit_peak = max(self._unsplit_peak, now)

    def behind(self, call: Call) -> None:
        """Note that the backward goes on from a module to others, up to the next split one."""
        self._here = call.inside.nbytes if call.inside.requires_grad else 0

    def beyond(self, waiting: Iterable[Call]) -> int:
        """Return the bytes beyond the unsplit peak, if the largest of these weight gradients came now.

        Or the largest of those that cannot wait, which an unsplit backward would compute now, too.
        """
        largest = max((call.params[0].nbytes for call in waiting), default=0)
        held = self._here + self._grad_bytes - self._freed
        peak = max(self._unsplit_peak, self._here + self.others - self._unsplit_freed)
        return max(held + largest - self._unsplit_peak, held + self.others - peak)

    def passed(self, call: Call, keep: bool) -> None:
        """Note that an unsplit backward would have ended the module's part."""
        if not keep:
            call.input.modules -= 1
            if not call.input.modules:
                self._unsplit_freed += call.input.bytes

    def waits(self, grad: Tensor) -> None:
        place, size = _memory(grad)
        if not self._grads[place]:
            self._grad_bytes += size
        self._grads[place] += 1

    def computed(self, call: Call, grad: Tensor, keep: bool) -> None:
        """Note that a weight gradient need not wait any more."""
        place, size = _memory(grad)
        self._grads[place] -= 1
        if not self._grads[place]:
            self._grad_bytes -= size
        self.freed(call, keep)

    def freed(self, call: Call, keep: bool) -> None:
        """Note that a module needs its input no more."""
        if not keep:
            call.input.weights -= 1
            if not call.input.weights:
                self._freed += call.input.bytes
