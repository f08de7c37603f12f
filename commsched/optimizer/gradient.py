"""All state of one parameter's gradient, the memory in which user code sees it, and how it travels.

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

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comm_core import alias_of, changed_rows, move_out, shares_storage, storage_holders
from commsched.backends.interface import Backend
from commsched.backends.ranks import Members
from commsched.optimizer.buckets import Buffers, Slice
from commsched.optimizer.pending import can_pend, clear_raw_grad, raw_grad, set_raw_grad


@dataclass(slots=True)
class Sum:
    """With ``op=Sum``: a sum in ``p.grad`` to which later gradients add. Only the difference is reduced."""

    shown: torch.Tensor
    version: int  # that it has if nothing but autograd has added to it
    base: torch.Tensor | None  # the sum itself, where no slot holds it

    @classmethod
    def of(cls, shown: torch.Tensor, in_slot: bool = False) -> Sum:
        return cls(shown, shown._version, None if in_slot else shown.clone())


class Gradient:
    """One parameter's gradient: where it travels, how far it is in this round, what user code holds."""

    def __init__(self, number: int, param: nn.Parameter, name: str) -> None:
        self.number, self.param, self.name = number, param, name
        self.pends = can_pend(param)  # whether the parameter can complete itself when it is read
        self.twice = False  # two have come in one backward: from then on it is taken at the end of each

        # By plan. Without elements there is no slot: nothing travels.
        self.view: torch.Tensor | None = None  # the slot, shaped as the parameter; user code never sees it
        self.alias: torch.Tensor | None = None  # the same memory, with the storage of what user code sees
        self._home: Any = None  # the flat buffer, and the slot's first element in it
        self.buckets: Sequence[int] = ()
        self.payload = Payload()

        # By round.
        self.filled = -1  # the last round into which a gradient was put
        self.seen = -1  # the last round in which one was left in p.grad until the end of the backward
        self.exposed = True  # the sum, and the update that waited for it, are complete
        self.apart: torch.Tensor | None = None  # what is reduced when the flags are read, then the result

        # Between rounds.
        self.local: torch.Tensor | None = None  # came while the sum travelled; is added when that arrives
        self.sum: Sum | None = None
        self.clear: bool | None = None  # zero_grad(set_to_none=...) was called while an update was pending
        self.touched = False  # user code has set p.grad while its sum travelled: that value counts
        self.unclear = False  # its backward has raised, and nobody has cleared it since
        self._shown: torch.Tensor | None = None  # p.grad while its sum travels, to be handed out again

    def place(self, buffers: Buffers | None) -> None:
        """Take new buckets into use; a dense gradient that is there keeps its values."""
        in_slot = self.sum if self.sum is not None and self.sum.base is None else None
        kept = self.view if in_slot is not None else raw_grad(self.param)
        slot = buffers.layout.slots.get(self.number) if buffers is not None else None
        before, self.view, self.alias, self._home, self._shown = self.alias, None, None, None, None
        if before is not None and storage_holders(before) > 1:
            move_out(before)  # the flat buffer is given back
        if slot is None or buffers is None:
            self.buckets = ()
            if in_slot is not None and kept is not None:
                in_slot.base = kept.clone()
            return
        self.buckets = slot.buckets
        self.view = view = buffers.view(self.param, slot)
        self._address = view.data_ptr()
        self._home = buffers.flat[slot.group], slot.offset
        self.alias = self._new_alias()
        if kept is not None and not kept.is_sparse:
            with torch.no_grad():
                view.copy_(kept)

    # -- what user code sees ---------------------------------------------------------------------------------

    def take(self, grad: torch.Tensor | None) -> None:
        """Let ``p.grad`` be None while `grad` travels; the same tensor is handed out afterwards."""
        if grad is not None and self._is_slot(grad):
            self._shown = grad
        set_raw_grad(self.param, None)

    def hand_out(self) -> None:
        """Let ``p.grad`` be the memory of the slot."""
        shown, self._shown = self._shown, None
        if shown is None or not self._is_slot(shown):
            assert self.alias is not None
            if self.alias.data_ptr() != self._address:  # user code has moved the storage: share_memory_()
                self.alias = self._new_alias()
            shown = self.alias.detach()
        set_raw_grad(self.param, shown)

    def keep_local(self, grad: torch.Tensor, backend: Backend) -> None:
        """Set aside what autograd has just accumulated, while the sum travels."""
        if self.local is not None:
            backend.reads(self.local)  # it is dropped here
            grad = self.local + grad
        self.local = grad
        set_raw_grad(self.param, None)

    def keep_unseen(self) -> None:
        """Set aside what autograd has just accumulated, where a hook of user code reads it before ours."""
        grad = raw_grad(self.param)
        if grad is not None and not self.touched:
            self.local = grad if self.local is None else self.local + grad
            set_raw_grad(self.param, None)

    def show_zeros(self) -> None:
        """Let ``p.grad`` be zeros, if it is None: its sum was cleared with ``set_to_none=False``."""
        if raw_grad(self.param) is None:
            with torch._C.DisableTorchFunctionSubclass():
                set_raw_grad(self.param, torch.zeros_like(self.param, requires_grad=False))

    def show_sum(self, factor: float, sums: bool) -> None:
        """Let ``p.grad`` be the sum of a gradient without a slot."""
        self.keep_unseen()
        total = self.apart
        if total is None or self.touched:
            return
        total = total if factor == 1.0 else total * factor
        set_raw_grad(self.param, total)
        self.sum = Sum.of(total) if sums else None

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
        return self.view is not None and not grad.is_sparse and grad.data_ptr() == self._address

    def _is_slot(self, grad: torch.Tensor) -> bool:
        view = self.view
        return (
            view is not None
            and not grad.is_sparse
            and grad.data_ptr() == self._address
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
                self.added_to(there)
            else:
                set_raw_grad(self.param, local + there)

    def added_to(self, grad: torch.Tensor) -> bool:
        """Note that autograd, or this class, has added to a gradient; return whether that is a sum."""
        if self.sum is None or grad is not self.sum.shown:
            return False
        self.sum.version += 1
        return True

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
        if sums and self.view is not None and not self.touched:
            self.sum = Sum.of(copy)
        elif self.sum is not None:
            self.sum = Sum(copy, copy._version, self.sum.base)


# -- how a gradient is put into its slot and travels from there ----------------------------------------------


class Payload:
    """How the gradient of one parameter travels in one plan: as it is.

    Also for embeddings that travel by rows: the engine leaves out rows of zeros, whatever wrote the gradient.
    """

    sums_nothing_but_rows = True  # where all ranks' gradients are sparse, the other rows of the slot are zero

    def __init__(
        self, number: int = -1, view: torch.Tensor | None = None, buckets: Sequence[int] = ()
    ) -> None:
        self.number, self.view = number, view
        self.buckets = buckets  # complete when the gradient is there
        self.zeros = False  # the slot holds nothing but zeros

    def begin(self) -> None:
        """React to a new round."""

    def put(self, grad: torch.Tensor, backend: Backend) -> bool:
        """Write a dense gradient into the slot; return whether its buckets may be sent before the end of the
        backward.
        """
        assert self.view is not None
        self.zeros = False
        backend.put(self.number, grad, self.view)
        return True

    def put_zeros(self) -> None:
        """Write a gradient of zeros."""
        assert self.view is not None
        if self.zeros:
            self.zeros = False  # other ranks' gradients may make it something else
        else:
            self.view.zero_()

    def put_part(self, part: torch.Tensor) -> Sequence[int] | None:
        """Write a part of the gradient that comes first; return the buckets that it completes, if it may."""
        return None

    def seal(self) -> None:
        """React to the end of the round's filling."""

    def unused(self, values: Buffers) -> None:
        """React to a sum that nobody will read."""


# The key in the optimizer's state of what a parameter's reduced gradients still lack.
RESIDUAL = "wire_residual"

OptimizerState = dict[Any, dict[str, Any]]


class Blocks(Payload):
    """A gradient quantised in blocks: the residuals of rounding are sent with the next one."""

    sums_nothing_but_rows = False  # residuals of any row

    def __init__(self, number: int, view: torch.Tensor, buckets: Sequence[int], residuals: Residuals) -> None:
        super().__init__(number, view, buckets)
        self._residuals = residuals

    def unused(self, values: Buffers) -> None:
        self._residuals.give_back((self.number,), values)


class Residuals:
    """What quantising has lost so far of the gradients of one optimizer (error feedback).

    The engine adds a residual to the next values before it rounds them, and leaves the new one in its place.
    Each rank has residuals of what it sends (``sent``), scaled as it is sent: of its own gradients, in two
    tiers of its host's sums of some shards. The engine brings those of a new plan's shards to their ranks.
    The owner of a shard has those of the shard's sums too (``sums``), scaled as all ranks get them, where
    gradients are gathered. All are zero at first. ``params``: the quantised parameters by index, or none.
    """

    def __init__(
        self,
        params: Mapping[int, nn.Parameter],
        group: int,
        ranks: Members,
        scale: float,
        of_sums: bool,
        state: Callable[[], OptimizerState],
    ) -> None:
        """``scale``: applied to sums; ``of_sums``: whether sums are rounded; ``state``: the optimizer's."""
        self.params, self._group, self._ranks, self._scale = params, group, ranks, scale
        self._of_sums, self._state = of_sums, state
        self._sent: Buffers | None = None
        self._sums: dict[int, torch.Tensor] = {}  # by bucket

    def install(self, buffers: Buffers) -> None:
        """Take new buckets into use. Collective."""
        if not self.params:
            return
        before, sums = self._sent, self._whole_sums()
        self._sent = buffers.more((self._group,))
        moved = buffers.more((self._group,))
        if before is not None and sums is not None:
            self._move(before, self._sent)
            self._move(sums, moved)
        if self._of_sums:
            self._sums = {piece.number: self._own(moved, piece).clone() for piece in self._pieces}
        self.take()

    def by_bucket(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the residuals of gradients and of sums for each quantised bucket."""
        if self._sent is None:
            return {}
        return {
            piece.number: (self._sent.bucket(piece.number), self._sums.get(piece.number))
            for piece in self._pieces
        }

    def give_back(self, params: Collection[int], values: Buffers) -> None:
        """Let the owners send these reduced values of parameters again."""
        if self._sent is None or not params:
            return
        for piece in self._pieces:
            first, last = self._shard(piece)
            for i in set(piece.params).intersection(params):
                slot = values.layout.slots[i]
                part = slice(max(first, slot.offset), min(last, slot.offset + slot.numel))
                if part.start < part.stop:
                    again = values.flat[self._group][part] / self._scale
                    self._sent.flat[self._group][part] += again

    # -- in the optimizer's state ----------------------------------------------------------------------------

    def added_to(self, state: OptimizerState) -> OptimizerState:
        """Return the state with the residuals that are not zero, summed over the ranks. Collective."""
        if self._sent is None:
            return state
        whole = self._sent.more((self._group,))
        whole.flat[self._group].copy_(self._sent.flat[self._group]).mul_(self._scale)
        for piece in self._pieces:
            if piece.number in self._sums:
                self._own(whole, piece).add_(self._sums[piece.number])
        self._ranks.add_up(whole.flat[self._group], RESIDUAL)
        views = {p: whole.view(p, whole.layout.slots[i]) for i, p in self.params.items()}
        return {
            **state,
            **{p: {**state.get(p, {}), RESIDUAL: v.clone()} for p, v in views.items() if v.any()},
        }

    def keep(self) -> None:
        """Put the residuals into the optimizer's state. Collective."""
        state = self._state()
        state.update(self.added_to(state))

    def load(self) -> None:
        """Replace the residuals by those in the optimizer's state. Every rank must call."""
        if self._sent is not None:
            for mine in (self._sent.flat[self._group], *self._sums.values()):
                mine.zero_()  # in place: the engine has their addresses
            self.take()

    def take(self) -> None:
        """Take residuals out of the optimizer's state: their owners send them with the next gradients."""
        state = self._state()
        kept = {i: state[p].pop(RESIDUAL) for i, p in self.params.items() if RESIDUAL in state.get(p, {})}
        for i in kept:
            if not state[self.params[i]]:
                del state[self.params[i]]  # an entry without its own keys looks like a broken one
        if kept and self._sent is not None:
            loaded = self._sent.more((self._group,))
            for i, value in kept.items():
                loaded.view(self.params[i], loaded.layout.slots[i]).copy_(value)
            self.give_back(kept.keys(), loaded)

    # -- in the buckets --------------------------------------------------------------------------------------

    @property
    def _pieces(self) -> list[Slice]:
        assert self._sent is not None
        return [piece for piece in self._sent.layout.slices if piece.group == self._group]

    def _shard(self, piece: Slice) -> tuple[int, int]:
        return piece.shard(self._ranks.rank, self._ranks.size)

    def _own(self, buffers: Buffers, piece: Slice) -> torch.Tensor:
        first, last = self._shard(piece)
        return buffers.flat[self._group][first:last]

    def _whole_sums(self) -> Buffers | None:
        """Return the residuals of sums of all owners; None before the first buckets. Collective."""
        if self._sent is None:
            return None
        whole = self._sent.more((self._group,))
        for piece in self._pieces:
            if piece.number in self._sums:
                self._own(whole, piece).copy_(self._sums[piece.number])
        if self._of_sums:
            self._ranks.add_up(whole.flat[self._group], RESIDUAL)
        return whole

    def _move(self, before: Buffers, now: Buffers) -> None:
        for i in self.params:
            old, new = before.layout.slots[i], now.layout.slots[i]
            values = before.flat[self._group].narrow(0, old.offset, old.numel)
            now.flat[self._group].narrow(0, new.offset, new.numel).copy_(values)


class Tied(Payload):
    """The gradient of a tied weight: the head's part is sent first, then the rows that it lacks.

    The head's part is there when the backward begins, the embedding's when it ends, and that one is zero in
    all rows but those of the batch's tokens. When the whole gradient is there, the rows in which it differs
    from what was sent, on any rank, are summed anew and written over the sums. Those have the bits of whole
    gradients then: in all other rows autograd adds zeros. Every rank decides for itself whether it sends the
    part early: one that does not sends the whole gradient in its place, and has changed no rows.
    """

    def __init__(
        self, number: int, view: torch.Tensor, whole: torch.Tensor, pieces: Sequence[Slice], buffers: Buffers
    ) -> None:
        """``whole``: the memory of the whole gradient; ``pieces``: the buckets of both."""
        corrections = [piece for piece in pieces if buffers.layout.corrected(piece.number) is not None]
        numbers = [piece.number for piece in corrections]
        super().__init__(number, view, numbers)
        self._whole = whole
        self._heads = [piece.number for piece in pieces if piece.number not in numbers]
        self.early = False  # this rank has sent the head's part first
        self.changed: dict[int, torch.Tensor] = {}  # by bucket: how many rows have changed, and their numbers
        self._rows: list[tuple[slice, torch.Tensor]] = []
        for piece in corrections:
            rows = slice(piece.start // piece.row, piece.stop // piece.row)
            changed = torch.zeros(1 + rows.stop - rows.start, dtype=torch.int32, device="cpu")
            self.changed[piece.number] = changed
            self._rows.append((rows, changed))

    def begin(self) -> None:
        self.early = False

    def put(self, grad: torch.Tensor, backend: Backend) -> bool:
        if self.early:
            self._correct(grad)
        else:
            super().put(grad, backend)
        return self.early

    def put_zeros(self) -> None:
        if self.early:
            self._correct(torch.zeros_like(self._whole))
        else:
            super().put_zeros()

    def put_part(self, part: torch.Tensor) -> Sequence[int] | None:
        """Put the head's part where the sum will be, as autograd adds zeros to it."""
        if self.early:
            return None
        assert self.view is not None
        self.early = True
        torch.add(part, 0.0, out=self._whole)
        self.view.copy_(self._whole)
        return self._heads

    def _correct(self, grad: torch.Tensor) -> None:
        """Note the rows in which the whole gradient differs from the part that was sent."""
        whole, grad = self._whole, grad.contiguous()
        for rows, changed in self._rows:
            changed_rows(whole[rows], grad[rows], changed)
            numbers = changed[1 : 1 + int(changed[0])].long()
            whole[rows][numbers] = grad[rows][numbers]

    def seal(self) -> None:
        """Prepare a gradient that is sent when it is whole: other ranks may have changed rows of it."""
        if not self.early:
            assert self.view is not None
            self._whole.copy_(self.view)
            for _, changed in self._rows:
                changed[0] = 0


def is_zero(grad: torch.Tensor) -> bool:
    return not (grad._values() if grad.is_sparse else grad).any()


def payload_of(
    number: int, view: torch.Tensor, buffers: Buffers, like: torch.Tensor, residuals: Residuals
) -> Payload:
    """Return the payload of a parameter that has a slot."""
    layout = buffers.layout
    buckets, whole = layout.slots[number].buckets, layout.corrections.get(number)
    if whole is not None:
        pieces = [layout.slices[bucket] for bucket in buckets]
        return Tied(number, view, buffers.view(like, whole), pieces, buffers)
    if number in residuals.params:
        return Blocks(number, view, buckets, residuals)
    return Payload(number, view, buckets)
