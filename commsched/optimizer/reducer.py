"""The state of all gradients of one optimizer, from one step to the next.

A **round** is one reduction of every bucket by the engine. The first gradient of a backward opens it, the end
of the backward seals it (what no gradient filled counts as zero, and a flag says so), and whoever needs a
gradient or a parameter completes the buckets it stands in. ``defer`` hands over the optimizer's update, which
then happens on completion.

Threads: hooks and ``seal`` run on the thread that runs the backward, completions on whichever thread touches
a parameter; ``_lock`` guards all state here. The engine's thread never enters Python. ``docs/engine.md`` says
who owns which buffer when.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from commsched.backends.cpu import Wire
from commsched.optimizer.arrivals import Arrivals, Phase
from commsched.optimizer.gradients import raw_grad, set_raw_grad
from commsched.optimizer.nested_forwards import inside_a_backward
from commsched.optimizer.pending import can_pend
from commsched.optimizer.step_state import DENSE, LATE, SPARSE, Round


class Flow(Arrivals):
    """Gradients in, reduced gradients (and, deferred, updated parameters) out."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], wire: Wire, sums: bool) -> None:
        super().__init__(params, names, wire, sums)
        # Nothing is sent before the end of the backward; so in the first round, to see what fires twice.
        self.hold = True
        self.vote = 0  # this rank's votes for a new plan
        self.votes = 0  # those of all ranks in the last round but one: the same number on every rank
        self.fired_twice: set[int] = set()
        self._callback_queued = False

    def on_grad(self, i: int) -> None:
        """Autograd has accumulated a gradient into parameter ``i``."""
        if self.watch is not None:
            self.watch.grad(i)
        if self.paused:
            return
        with self._lock:
            grad = raw_grad(self.params[i])
            if grad is None:  # though autograd has just put it there
                raise ValueError(
                    f"somebody took the gradient of {self.names[i]} before it could be reduced: a hook that"
                    " clears gradients, or another DistributedOptimizer over the same parameters (call that"
                    " one's close() first)"
                )
            self._passes[i] += 1
            if self._passes[i] < self.backward_passes:
                self._keep_in_place(i, grad)
                return
            if self.phase is not Phase.FILLING:
                grad = self._open(i, grad)
            if not self._callback_queued:
                self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            if self.round.filled[i]:
                self._fill_again(i, grad)
                return
            self._fill(i, grad)
            if not self.hold and i in self.slots and i not in self.fired_twice:
                for bucket in self.round.count_down(self.slots[i].buckets):
                    self._send(bucket)

    def _keep_in_place(self, i: int, grad: torch.Tensor) -> None:
        """Lets the next pass of a local accumulation add into the bucket itself, unless that is still in
        use.
        """
        view = self.views.get(i)
        if view is None or self.pending or self.phase is not Phase.IDLE or grad.is_sparse or self.sums:
            return
        if grad.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(grad)
            set_raw_grad(self.params[i], view)

    def _open(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """Starts a round, after all that is still on its way. Returns the gradient that parameter ``i`` now
        has.

        A backward without a step since the last one adds to what that one has reduced: plain PyTorch
        accumulates.
        """
        self._begin_round()
        earlier = raw_grad(self.params[i])
        if earlier is None or earlier is grad:
            return grad
        if grad.is_sparse or earlier.is_sparse or earlier.data_ptr() != grad.data_ptr():
            with torch.no_grad():
                grad = earlier.add_(grad)
        return grad

    def _fill(self, i: int, grad: torch.Tensor) -> None:
        """Puts a gradient into its slot, where autograd has not written it there itself."""
        self.round.filled[i] = True
        view = self.views.get(i)
        if view is None:
            return  # no elements: nothing to reduce
        if grad.requires_grad:
            grad = grad.detach()  # of a backward with create_graph
        if grad.is_sparse:
            grad = self._only_new_of_sparse(i, grad)
            self._flag[i] = SPARSE
            if self.sparse_as_dense:
                self.sparse_dims[i] = grad.sparse_dim()
                self._put(i, grad.to_dense(), view)
            else:
                self.round.sparse[i] = grad
                view.zero_()
        else:
            self._flag[i] = DENSE
            if i in self._kept and self.wire.rank != 0:
                self._only_new(i, grad, view)
            else:
                self._put(i, grad, view)
        self._kept.pop(i, None)
        set_raw_grad(self.params[i], None)

    def _put(self, i: int, grad: torch.Tensor, view: torch.Tensor) -> None:
        """A dense gradient goes to its slot."""
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)

    def _only_new(self, i: int, grad: torch.Tensor, view: torch.Tensor) -> None:
        """With op=Sum, an earlier round's sum that was not cleared is contributed by rank 0 alone."""
        kept = self._kept[i]
        if grad is not kept.shown:
            view.copy_(grad)
        elif grad._version > kept.version + self.backward_passes:
            raise ValueError(
                f"the gradient of {self.names[i]} was changed after it had been summed and is now added to"
                " again; with op=Sum, call optimizer.zero_grad() before the next backward, or use op=Average"
            )
        else:
            view.neg_().add_(grad)

    def _only_new_of_sparse(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(i)
        if kept is None or kept.sparse is None or grad is not kept.shown or self.wire.rank == 0:
            return grad
        return grad - kept.sparse

    def _fill_again(self, i: int, grad: torch.Tensor) -> None:
        """A second gradient in one backward (reentrant checkpointing of a module that is used twice)."""
        self.fired_twice.add(i)
        set_raw_grad(self.params[i], None)
        if i not in self.slots:
            return
        stays_sparse = grad.is_sparse and not self.sparse_as_dense
        if stays_sparse or i in self.round.sparse or any(self.round.sent[b] for b in self.slots[i].buckets):
            self.round.add_late(i, grad)
            self._flag[i] += LATE if self._flag[i] < LATE else 0
        else:
            with torch.no_grad():
                self.views[i].add_(grad)

    def _send(self, bucket: int) -> None:
        self.round.sent[bucket] = True
        self.wire.mark_ready(bucket)

    def _end_of_backward(self) -> None:
        self._callback_queued = False
        with self._lock:
            if self.phase is not Phase.FILLING:
                return
            if inside_a_backward():
                # A backward within a backward: the outer one goes on. Should no gradient come any more,
                # reading one seals.
                self._guard(only_grad=True)
                return
            if self.watch is not None:
                self.watch.backward_end()
            self.seal()

    def seal(self) -> None:
        """Ends the round's filling. Gradients that are there without a backward's doing count like any
        other.
        """
        with self._lock:
            if self.phase is not Phase.FILLING:
                self._begin_round()
            for i, view in self.views.items():
                if not self.round.filled[i]:
                    grad = raw_grad(self.params[i])
                    if grad is not None:
                        self._fill(i, grad)
                    else:
                        view.zero_()
            for bucket, sent in enumerate(self.round.sent):
                if not sent:
                    self._send(bucket)
            tail = len(self.params)
            self._flag[tail] = self.vote
            self._flag[tail + 1 + self.wire.rank] = int(self._stepped)
            self._stepped = False
            self.wire.mark_flags_ready()
            self.phase = Phase.SENT
            self.hold = False
            self.rounds += 1
            self.pending = len(self.views)
            self._guard(only_grad=True)
            unguarded = [i for i in self.views if not can_pend(self.params[i])]
            if unguarded:
                self.complete(unguarded)

    def drain(self) -> None:
        """Before the end: applies what is on its way, and lets the engine do its part of the last round."""
        with self._lock:
            if self.phase is Phase.IDLE:
                self.complete_all()
            elif self.phase is Phase.SENT:
                self._finish_round()

    def _finish_round(self) -> None:
        for bucket in range(len(self.round.done)):
            self.wire.wait_gathered(bucket)

    def finish_all(self) -> None:
        """Ends all that is under way, so that another flow can take over; gradients stay."""
        self.complete_all()

    def inherit(self, before: Flow) -> None:
        """Goes on where a flow over other parameters has finished."""
        self.backward_passes, self.paused = before.backward_passes, before.paused
        place = {id(param): i for i, param in enumerate(self.params)}
        for j, kept in before._kept.items():
            i = place.get(id(before.params[j]))
            if i is not None:
                self._kept[i] = kept
                set_raw_grad(self.params[i], kept.shown)

    def take_state(self) -> None:
        """A new state has been loaded into the optimizer."""

    def _begin_round(self) -> None:
        self.complete_all()
        self._deferred = self._clear = None
        self.votes = self.round.used[len(self.params)] if self.rounds and self.round.used else 0
        self.round = Round(self.buffers.layout, len(self.params))
        self.flags.zero_()
        self.wire.begin_step()
        self.phase = Phase.FILLING
        self._callback_queued = False  # of a backward that ended with an exception, which calls nobody back
