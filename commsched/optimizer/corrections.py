"""Tied weights whose gradients are sent in part: the head's part first, then the rows that it lacks.

The head's part of a tied weight's gradient is there when the backward begins, the embedding's when it ends,
and that one is zero in all rows but those of the batch's tokens. So the head's part is sent at once. When the
whole gradient is there, the rows in which it differs from what was sent, on any rank, are summed anew and
written over the sums. Those have the bits of whole gradients then: in all other rows autograd adds zeros.

Every rank decides for itself whether it sends a part early: one that does not sends the whole gradient in its
place, and has changed no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core import changed_rows
from commsched.optimizer.bucket_layout import Buffers


class Corrections:
    """The gradients of tied weights in one round.

    ``heads``, ``buckets``: by parameter the buckets of the head's part, and of the rows that correct it.
    ``changed``: by bucket these rows' numbers.
    """

    def __init__(self) -> None:
        self.heads: dict[int, list[int]] = {}
        self.buckets: dict[int, list[int]] = {}
        self.changed: dict[int, torch.Tensor] = {}
        self.early: set[int] = set()  # the parameters whose part has been taken in this round
        self._whole: dict[int, torch.Tensor] = {}
        self._rows: dict[int, list[tuple[slice, torch.Tensor]]] = {}

    def install(self, buffers: Buffers, params: Sequence[torch.Tensor]) -> None:
        """Take new buckets into use."""
        layout = buffers.layout
        self.early.clear()
        self.changed, self._rows = {}, {i: [] for i in layout.corrections}
        self._whole = {i: buffers.view(params[i], slot) for i, slot in layout.corrections.items()}
        for piece in layout.slices:
            if (i := layout.corrected(piece.number)) is not None:
                rows = slice(piece.start // piece.row, piece.stop // piece.row)
                changed = torch.zeros(1 + rows.stop - rows.start, dtype=torch.int32)
                self.changed[piece.number] = changed
                self._rows[i].append((rows, changed))
        self.buckets = {i: slot.buckets for i, slot in layout.corrections.items()}
        self.heads = {i: [b for b in layout.slots[i].buckets if b not in self.changed] for i in self.buckets}

    def __contains__(self, i: int) -> bool:
        return i in self._whole

    def begin(self) -> None:
        """React to a new round."""
        self.early.clear()

    def take_part(self, i: int, part: torch.Tensor, view: torch.Tensor) -> None:
        """Put the head's part of a gradient where the sum will be, as autograd adds zeros to it."""
        self.early.add(i)
        torch.add(part, 0.0, out=self._whole[i])
        view.copy_(self._whole[i])

    def complete(self, i: int, grad: torch.Tensor | None) -> None:
        """Find the rows in which the whole gradient (None: zeros) differs from the part that was taken."""
        whole = self._whole[i]
        grad = torch.zeros_like(whole) if grad is None else grad.contiguous()
        for rows, changed in self._rows[i]:
            changed_rows(whole[rows], grad[rows], changed)
            numbers = changed[1 : 1 + int(changed[0])].long()
            whole[rows][numbers] = grad[rows][numbers]

    def follow(self, i: int, view: torch.Tensor) -> None:
        """Prepare a gradient that is sent when it is whole: other ranks may have changed rows of it."""
        self._whole[i].copy_(view)
        self.clear(i)

    def clear(self, i: int) -> None:
        """Forget the rows that have changed."""
        for _, changed in self._rows[i]:
            changed[0] = 0
