"""What quantising has lost so far of the gradients of one optimizer (error feedback).

The engine adds a residual to the next values before it rounds them, and leaves the new one in its place. Each
rank has residuals of its own gradients (``sent``), scaled as they are sent. The owner of a shard has those of
the shard's sums too (``sums``), scaled as all ranks get them, where gradients are gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commsched.backends.ranks import Ranks
from commsched.optimizer.bucket_layout import Buffers, Slice
from commsched.optimizer.model_layers import Model

# In a state dict: what the reduced gradients of a parameter still lack.
KEY = "wire_residual"

State = dict[Any, dict[str, Any]]


class Residuals:
    """The residuals of the parameters in one group; all zero at first."""

    def __init__(
        self,
        params: Mapping[int, nn.Parameter],  # by index
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
        found = {i: state[p].pop(KEY) for i, p in self.params.items() if KEY in state.get(p, {})}
        for i in found:
            if not state[self.params[i]]:
                del state[self.params[i]]  # an entry without its own keys looks like a broken one
        if found and self._sent is not None:
            loaded = self._sent.more((self._group,))
            for i, value in found.items():
                loaded.view(self.params[i], loaded.layout.slots[i]).copy_(value)
            self.give_back(found.keys(), loaded)

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


def residuals_of(
    optimizer: Any,
    params: Sequence[nn.Parameter],
    model: Model,
    ranks: Ranks,
    scale: float,
    of_sums: bool,
) -> Residuals:
    """Return the residuals of a model's quantised parameters, none of which may be there."""
    # The optimizer owns the residuals: a strong reference back would be a cycle that delays their end.
    owner = weakref.proxy(optimizer)
    quantised = {i: params[i] for i in sorted(model.quantised)}
    group = model.groups[min(quantised)] if quantised else 0
    return Residuals(quantised, group, ranks, scale, of_sums, lambda: owner.__dict__["state"])
