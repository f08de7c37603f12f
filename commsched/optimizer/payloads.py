"""How a gradient is put into its slot and travels from there: dense, by rows, in blocks, or in two parts.

``Payload`` is the ordinary one. It also serves embeddings that travel by rows: the engine leaves out rows of
zeros, whatever wrote the gradient. ``Blocks`` is for gradients that are quantised, ``Tied`` for weights of an
embedding and a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from comm_core import changed_rows
from commsched.backends.interface import Backend
from commsched.backends.ranks import Ranks
from commsched.optimizer.buckets import Buffers, Slice


class Payload:
    """The gradient of one parameter in one plan."""

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

    def repeat(self) -> None:
        """Prepare a second reduction in the same round."""

    @property
    def sums_nothing_but_rows(self) -> bool:
        """Whether the slot has only zeros where all ranks' gradients are sparse."""
        return True

    def unused(self, values: Buffers) -> None:
        """React to a sum that nobody will read."""


# -- in blocks -----------------------------------------------------------------------------------------------

# In a state dict: what the reduced gradients of a parameter still lack.
KEY = "wire_residual"

State = dict[Any, dict[str, Any]]


class Blocks(Payload):
    """A gradient quantised in blocks: the residuals of rounding are sent with the next one."""

    def __init__(self, number: int, view: torch.Tensor, buckets: Sequence[int], residuals: Residuals) -> None:
        super().__init__(number, view, buckets)
        self._residuals = residuals

    @property
    def sums_nothing_but_rows(self) -> bool:
        return False  # but the sum of residuals

    def unused(self, values: Buffers) -> None:
        self._residuals.give_back((self.number,), values)


class Residuals:
    """What quantising has lost so far of the gradients of one optimizer (error feedback).

    The engine adds a residual to the next values before it rounds them, and leaves the new one in its place.
    Each rank has residuals of its own gradients (``sent``), scaled as they are sent. The owner of a shard has
    those of the shard's sums too (``sums``), scaled as all ranks get them, where gradients are gathered.
    All are zero at first. ``params``: the quantised parameters by index; there may be none.
    """

    def __init__(
        self,
        params: Mapping[int, nn.Parameter],
        group: int,
        ranks: Ranks,
        scale: float,
        of_sums: bool,
        state: Callable[[], State],
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

    def added_to(self, state: State) -> State:
        """Return the state with the residuals that are not zero, summed over the ranks. Collective."""
        if self._sent is None:
            return state
        whole = self._sent.more((self._group,))
        whole.flat[self._group].copy_(self._sent.flat[self._group]).mul_(self._scale)
        for piece in self._pieces:
            if piece.number in self._sums:
                self._own(whole, piece).add_(self._sums[piece.number])
        self._total(whole)
        views = {p: whole.view(p, whole.layout.slots[i]) for i, p in self.params.items()}
        return {**state, **{p: {**state.get(p, {}), KEY: v.clone()} for p, v in views.items() if v.any()}}

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
        kept = {i: state[p].pop(KEY) for i, p in self.params.items() if KEY in state.get(p, {})}
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
        return self._total(whole) if self._of_sums else whole

    def _total(self, buffers: Buffers) -> Buffers:
        self._ranks.add_up(buffers.flat[self._group], "commsched.wire_residual")
        return buffers

    def _move(self, before: Buffers, now: Buffers) -> None:
        for i in self.params:
            old, new = before.layout.slots[i], now.layout.slots[i]
            values = before.flat[self._group].narrow(0, old.offset, old.numel)
            now.flat[self._group].narrow(0, new.offset, new.numel).copy_(values)


# -- in two parts --------------------------------------------------------------------------------------------


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
            self.repeat()

    def repeat(self) -> None:
        for _, changed in self._rows:
            changed[0] = 0


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
