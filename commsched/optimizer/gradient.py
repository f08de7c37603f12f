"""All state of one parameter's gradient, and the memory in which user code sees it.

[Note: memory that users keep]
A gradient travels in its slot, a part of a flat buffer. After a reduction ``p.grad`` is a tensor over the
slot that user code gets and may do anything with. Three rules keep its tensors apart from ours:

1. ``p.grad`` is a fresh tensor each time it is handed out. ``p.grad.data = x`` and ``p.grad.set_(x)``
   re-point that tensor alone. Whoever reads ``p.grad`` back compares its address with the slot's.
2. The tensor's storage covers this slot only, so its use count says whether anybody holds this gradient, also
   through views and detached tensors.
3. Before anything writes into a slot whose gradient somebody holds besides ``p.grad``, the storage gets
   memory of its own with the present values (``free``). All tensors on it follow, and the slot is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comm_core import alias_of, data_pointers, move_out, shares_storage, storage_holders
from commsched.optimizer.buckets import Buffers
from commsched.optimizer.payloads import Payload
from commsched.optimizer.pending import can_pend, clear_raw_grad, raw_grad, set_raw_grad


@dataclass(slots=True)
class Sum:
    """With ``op=Sum``: a sum in ``p.grad`` to which later gradients add. Only the difference is reduced."""

    shown: torch.Tensor
    version: int
    base: torch.Tensor | None  # the sum itself, where no slot holds it

    @classmethod
    def of(cls, shown: torch.Tensor, in_slot: bool = False) -> Sum:
        return cls(shown, shown._version, None if in_slot else shown.clone())


class Gradient:
    """One parameter's gradient: where it travels, how far it is in this round, what user code holds."""

    __slots__ = (
        "_home",
        "_shown",
        "alias",
        "buckets",
        "clear",
        "exposed",
        "filled",
        "late",
        "local",
        "name",
        "number",
        "param",
        "payload",
        "pends",
        "seen",
        "sparse",
        "sum",
        "touched",
        "twice",
        "unclear",
        "view",
    )

    def __init__(self, number: int, param: nn.Parameter, name: str) -> None:
        self.number, self.param, self.name = number, param, name
        self.pends = can_pend(param)  # whether the parameter can complete itself when it is read
        self.twice = False  # two have come in one backward: from then on it is taken at the end of each

        # By plan. Without elements there is no slot: nothing travels.
        self.view: torch.Tensor | None = (
            None  # the slot, in the shape of the parameter; user code never sees it
        )
        self.alias: torch.Tensor | None = None  # the same memory, with the storage of what user code sees
        self._home: Any = None  # the flat buffer, and the slot's first element in it
        self.buckets: Sequence[int] = ()
        self.payload = Payload()

        # By round.
        self.filled = -1  # the last round into which a gradient was put
        self.seen = -1  # the last round in which one was left in p.grad until the end of the backward
        self.exposed = True  # the sum, and the update that waited for it, are complete
        self.sparse: torch.Tensor | None = None  # reduced at step time, if its rank has put a sparse gradient
        self.late: torch.Tensor | None = None  # came after its bucket was sent, in the same backward

        # Between rounds.
        self.local: torch.Tensor | None = None  # came while the sum travelled; is added when that arrives
        self.sum: Sum | None = None
        self.clear: bool | None = None  # zero_grad(set_to_none=...) was called while an update was pending
        self.touched = False  # user code has set p.grad while its sum travelled: that value counts
        self.unclear = False  # its backward has raised, and nobody has cleared it since
        self._shown: torch.Tensor | None = None  # p.grad while its sum travels, to be handed out again

    def place(self, buffers: Buffers | None) -> None:
        """Take new buckets into use; a dense gradient that is there keeps its values."""
        grad = raw_grad(self.param)
        kept = self.view if self.sum is not None and self.sum.base is None else grad
        slot = buffers.layout.slots.get(self.number) if buffers is not None else None
        before, self.view, self.alias, self._home, self._shown = self.alias, None, None, None, None
        if before is not None and storage_holders(before) > 1:
            move_out(before)  # the flat buffer is given back
        if slot is None or buffers is None:
            self.buckets = ()
            if self.sum is not None and self.sum.base is None and kept is not None:
                self.sum.base = kept.clone()
            return
        self.buckets = slot.buckets
        self.view = view = buffers.view(self.param, slot)
        flat = buffers.flat[slot.group]
        self._home = (flat, slot.offset)
        self.alias = self._new_alias()
        if kept is not None and not kept.is_sparse:
            with torch.no_grad():
                view.copy_(kept)

    # -- what user code sees ---------------------------------------------------------------------------------

    def take(self) -> None:
        """Let ``p.grad`` be None while the gradient travels; the same tensor is handed out afterwards."""
        grad = raw_grad(self.param)
        if grad is not None and self._is_slot(grad):
            self._shown = grad
        set_raw_grad(self.param, None)

    def hand_out(self) -> None:
        """Let ``p.grad`` be the memory of the slot."""
        shown, self._shown = self._shown, None
        if shown is None or not self._is_slot(shown):
            assert self.alias is not None
            shown = self.alias.detach()
        set_raw_grad(self.param, shown)

    def show_zeros(self) -> None:
        """Let ``p.grad`` be zeros, if it is None: its sum was cleared with ``set_to_none=False``."""
        if raw_grad(self.param) is None:
            with torch._C.DisableTorchFunctionSubclass():
                set_raw_grad(self.param, torch.zeros_like(self.param, requires_grad=False))

    def free(self) -> None:
        """Let the slot be written: whoever holds an earlier gradient keeps its values in memory apart."""
        alias = self.alias
        if alias is None or storage_holders(alias) == 1:
            return
        grad = raw_grad(self.param)
        own = grad is not None and not grad.is_sparse and shares_storage(grad, alias)
        if storage_holders(alias) > 1 + own:
            self.move_out()

    def move_out(self) -> None:
        """Give all that user code holds of this gradient memory of its own."""
        assert self.alias is not None and self.view is not None
        move_out(self.alias)
        self.alias = self._new_alias()

    def _new_alias(self) -> torch.Tensor:
        assert self.view is not None
        flat, offset = self._home
        return alias_of(flat, offset, list(self.view.shape), list(self.view.stride()), self.view.dtype)

    def misfits(self) -> bool:
        """Return whether the parameter has been converted since its slot was made (``model.double()``)."""
        with torch._C.DisableTorchFunctionSubclass():
            view, param = self.view, self.param
            return view is not None and (param.dtype != view.dtype or param.shape != view.shape)

    def is_in_place(self, grad: torch.Tensor) -> bool:
        """Return whether a dense gradient is the slot's memory."""
        return self.view is not None and not grad.is_sparse and grad.data_ptr() == self.view.data_ptr()

    def _is_slot(self, grad: torch.Tensor) -> bool:
        view = self.view
        return (
            view is not None
            and not grad.is_sparse
            and grad.data_ptr() == view.data_ptr()
            and grad.shape == view.shape
            and grad.grad_fn is None
        )

    # -- between rounds --------------------------------------------------------------------------------------

    def add_local(self) -> None:
        """Add what came while the sum travelled to the sum."""
        local, self.local = self.local, None
        if local is None:
            return
        there = raw_grad(self.param)
        with torch.no_grad():
            if there is None:
                set_raw_grad(self.param, local)
            elif local.is_sparse or not there.is_sparse:
                there.add_(local)
            else:
                set_raw_grad(self.param, local + there)

    def apply_clear(self) -> None:
        """Clear the gradient, if ``zero_grad()`` was called while it was pending."""
        if self.clear is not None and clear_raw_grad(self.param, self.clear):
            self.sum = None
        self.clear = None

    def keep_values(self, sums: bool) -> None:
        """Copy what user code sees, because the buckets will change."""
        grad = raw_grad(self.param)
        if grad is None:
            return
        copy = grad.clone()
        set_raw_grad(self.param, copy)
        if sums and self.view is not None:
            self.sum = Sum.of(copy)


def overlapping(params: Sequence[torch.Tensor]) -> set[int]:
    """Return the places of parameters that share memory with others of them (``a.data = b.data``)."""
    spans = []
    with torch._C.DisableTorchFunctionSubclass():
        for place, (start, param) in enumerate(zip(data_pointers(list(params)), params, strict=True)):
            if param.numel():
                last = sum((n - 1) * step for n, step in zip(param.shape, param.stride(), strict=True))
                spans.append((start, start + (last + 1) * param.element_size(), place))
    shared: set[int] = set()
    end, longest = 0, -1
    for start, stop, place in sorted(spans):
        if start < end:
            shared |= {longest, place}
        if stop > end:
            end, longest = stop, place
    return shared
