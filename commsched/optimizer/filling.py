"""Writes gradients into their slots."""

from __future__ import annotations

import torch
from torch import nn

from commsched.backends.interface import Backend
from commsched.optimizer.pending import set_raw_grad
from commsched.optimizer.step_state import DENSE, LATE, SPARSE, StepState


class Filling:
    """Fills the slots of a round. ``fired_twice``: parameters that had two gradients in one backward."""

    def __init__(self, state: StepState, backend: Backend) -> None:
        self.state, self.backend = state, backend
        self.fired_twice: set[int] = set()

    def fill(self, i: int, grad: torch.Tensor) -> None:
        """Copy a gradient into its slot, unless autograd has written it there itself."""
        state = self.state
        state.round.filled[i] = True
        view = state.views.get(i)
        if view is None:
            return  # no elements: nothing to reduce
        if grad.requires_grad:
            grad = grad.detach()  # of a backward with create_graph
        if grad.is_sparse:
            self._fill_sparse(i, grad, view)
        else:
            state.flag[i] = DENSE
            state.zeros.discard(i)
            if i in state.corrections.early:
                state.corrections.complete(i, grad)
            elif i in state.kept and self.backend.ranks.rank != 0:
                self._fill_new(i, grad, view)
            else:
                self.backend.put(i, grad, view)
        state.kept.pop(i, None)
        param = state.params[i]
        if type(param) is nn.Parameter:
            param.grad = None
        else:
            set_raw_grad(param, None)

    def _fill_sparse(self, i: int, grad: torch.Tensor, view: torch.Tensor) -> None:
        state = self.state
        kept = state.kept.get(i)
        if kept is not None and kept.sparse is not None and grad is kept.shown and self.backend.ranks.rank:
            grad = grad - kept.sparse  # only the difference: see _fill_new
        state.flag[i] = SPARSE
        if state.sparse_as_dense:
            state.sparse_dims[i] = grad.sparse_dim()
            self.backend.put(i, grad.to_dense(), view)
        else:
            state.round.sparse[i] = grad
            self._fill_zeros(i, view)

    def _fill_zeros(self, i: int, view: torch.Tensor) -> None:
        if i in self.state.zeros:
            self.state.zeros.remove(i)  # other ranks' gradients may make it something else
        else:
            view.zero_()

    def _fill_new(self, i: int, grad: torch.Tensor, view: torch.Tensor) -> None:
        """Fill in the difference: with op=Sum, rank 0 alone contributes an earlier round's uncleared sum."""
        kept = self.state.kept[i]
        if grad is not kept.shown:
            view.copy_(grad)
        elif grad._version > kept.version + self.state.backward_passes:
            raise ValueError(
                f"the gradient of {self.state.names[i]} was changed after it had been summed and is now"
                " added to again; with op=Sum, call optimizer.zero_grad() before the next backward, or use"
                " op=Average"
            )
        else:
            view.neg_().add_(grad)

    def fill_again(self, i: int, grad: torch.Tensor) -> None:
        """Add a second gradient of one backward (reentrant checkpointing of a module that is used twice)."""
        state, now = self.state, self.state.round
        self.fired_twice.add(i)
        set_raw_grad(state.params[i], None)
        if i not in state.slots:
            return
        if i in now.sparse and grad.is_sparse:
            now.sparse[i] = now.sparse[i] + grad  # reduced at step time
            return
        sent = i in state.corrections.early or any(now.sent[b] for b in state.slots[i].buckets)
        if not sent:
            self.backend.take_back(i, state.views[i])
        if sent or i in now.sparse or (grad.is_sparse and not state.sparse_as_dense):
            now.late[i] = now.late[i] + grad if i in now.late else grad
            if state.flag[i] < LATE:
                state.flag[i] += LATE + DENSE * (i in now.sparse)
        else:
            with torch.no_grad():
                state.views[i].add_(grad)

    def fill_missing(self, i: int, grad: torch.Tensor | None) -> None:
        """Fill a slot whose gradient has not come in this backward: with ``p.grad``, or zeros."""
        if grad is not None:
            self.fill(i, grad)
        elif i in self.state.corrections.early:
            self.state.corrections.complete(i, None)
        else:
            self._fill_zeros(i, self.state.views[i])
