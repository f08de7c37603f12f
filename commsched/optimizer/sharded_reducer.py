"""The flow with ``gather="parameters"``: gradients are only reduced, each rank updates its shards, parameters
travel.

No rank holds a whole gradient after ``backward()``, so reading ``p.grad`` is an error unless
``synchronize()`` has gathered them; and a step leaves no gradients behind that a further backward could add
to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial, reduce

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.backends.cpu import Wire
from commsched.errors import CommError
from commsched.optimizer.arrivals import Phase
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.clipping import factor_for, total_norm
from commsched.optimizer.early_update import EarlyStepper
from commsched.optimizer.gradients import raw_grad, set_raw_grad
from commsched.optimizer.pending import can_pend, clear_pending, mark_pending
from commsched.optimizer.reducer import Flow
from commsched.optimizer.shards import Shards, check_elementwise
from commsched.optimizer.step_state import Kept
from scheduler.ir.actions import Kind
from scheduler.ir.program import Program


class ShardedFlow(Flow):
    """Gradients in, updated parameters out."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        wire: Wire,
        sums: bool,
        optimizer: Optimizer,
        base: type[Optimizer],
        masters: bool = False,
    ) -> None:
        check_elementwise(base)
        wire.agree("master_weights", str(masters), "pass the same arguments on every rank")
        strange = [name for name, param in zip(names, params, strict=True) if not can_pend(param)]
        if strange:
            raise ValueError(
                f"gather='parameters' moves parameters into flat buffers, and {strange[0]} is of a class of"
                " its own"
                f" ({type(params[names.index(strange[0])]).__name__}); use gather='gradients'"
            )
        super().__init__(params, names, wire, sums)
        # The optimizer owns the flow: a reference back would keep both from ending together.
        self._optimizer, self._base = weakref.proxy(optimizer), base
        self._masters = masters
        self._whole = False  # the user has had this round's gradients gathered
        self._consumed = False  # the last step left no gradients
        self._refusals = [partial(self._refuse, i) for i in range(len(self.params))]
        self.shards: Shards | None = None
        self._early: EarlyStepper | None = None

    def install(self, program: Program, buffers: Buffers, gathered: Buffers | None = None) -> None:
        with self._lock:
            state = None
            if self.shards is not None:
                self.settle()
                state = self.whole_state()
            where = buffers, self.wire.rank, self.wire.size
            self.shards = Shards(self._optimizer, self._base, self.params, *where, masters=self._masters)
            if state is not None:
                self._optimizer.__dict__["state"].update(state)
            self.take_state()
            super().install(program, buffers, self.shards.buffers)
            self._stop_early()
            self._reductions = [action.index for action in program.link if action.kind is Kind.RS]
            with torch._C.DisableTorchFunctionSubclass():
                counts = {i: self.params[i].untyped_storage() for i in self.slots}
                self._owners = {i: int(torch._C._storage_Use_Count(s._cdata)) - 1 for i, s in counts.items()}

            if program.early_step:
                self._early = EarlyStepper(self._update_early, self._reductions)

    def _stop_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None

    def close(self) -> None:
        super().close()
        self._stop_early()

    def _storage_owners(self, i: int) -> int:
        return self._owners[i]

    # -- reading ---------------------------------------------------------------------------------------------

    def complete(self, params: Iterable[int]) -> None:
        with self._lock:
            if self.phase is Phase.FILLING:
                self.seal()
            if self.phase is Phase.SENT and not self._whole:
                raise CommError(
                    f"rank {self.wire.rank}: with gather='parameters' no rank holds a whole gradient after"
                    " backward(); call"
                    " optimizer.synchronize() on all ranks before p.grad is read, or"
                    " optimizer.clip_grad_norm_() to clip"
                )
            super().complete(params)

    def refuse_early(self, what: str) -> None:
        """Whatever needs all gradients before the update comes too late with ``early_step``."""
        if self._early is not None:
            raise ValueError(
                f"early_step=True updates inside the backward, before {what} could do anything; use"
                " early_step=False"
            )

    def _refuse(self, i: int) -> None:
        raise CommError(
            f"rank {self.wire.rank}: the gradient of {self.names[i]} is gone: with gather='parameters'"
            " step() leaves none; read it"
            " after optimizer.synchronize() and before step(), and call optimizer.zero_grad() (not the"
            " model's) before the next backward"
        )

    def _show(self, i: int) -> bool:
        if self._consumed and self._clear is None:
            mark_pending(self.params[i], self._refusals[i], only_grad=True)
        return False

    def gather_gradients(self) -> None:
        """Every rank gets every reduced gradient. Collective."""
        self.refuse_early("synchronize()")
        with self._lock:
            if self._whole or self.phase is not Phase.SENT:
                return
            self._learn_flags()
            used = self.round.used
            assert used is not None
            for bucket in range(len(self.round.done)):
                self._wait_reduced(bucket)
            assert self.shards is not None
            self.shards.scale_gradients()
            for bucket in range(len(self.round.done)):
                self.wire.gather_now(self.buffers.bucket(bucket))
            self._whole = True
            for i, view in self.views.items():
                clear_pending(self.params[i])
                set_raw_grad(self.params[i], view if used[i] else None)
            if self.sums:
                self._detach_gradients()

    # -- the step --------------------------------------------------------------------------------------------

    def _learn_flags(self) -> None:
        super()._learn_flags()
        sparse = [self.names[i] for i in self.round.sparse]
        if sparse:
            raise ValueError(
                f"the gradient of {sparse[0]} is sparse, and gather='parameters' reduces dense buckets; use"
                " sparse_as_dense=True or"
                " gather='gradients'"
            )

    def _reduce_late(self) -> None:
        raise CommError(
            f"rank {self.wire.rank}: a parameter received a second gradient in one backward after its bucket"
            " had been sent"
            " (reentrant checkpointing of a module that is used twice?); use gather='gradients' or"
            " use_reentrant=False"
        )

    def _send(self, bucket: int) -> None:
        super()._send(bucket)
        if self._early is not None:
            self.wire.mark_early_flags(bucket, self.flags[list(self.buffers.layout.slices[bucket].params)])

    def _update_early(self, bucket: int) -> None:
        assert self.shards is not None
        self.wire.wait_reduced(bucket)
        flags = self.wire.wait_early_flags(bucket)
        used = dict(zip(self.buffers.layout.slices[bucket].params, flags, strict=False))
        self.shards.update(bucket, used)
        self.wire.mark_updated(bucket)

    def update_shards(self) -> None:
        """The optimizer's step: each bucket's shard once it is reduced, then its parameters may travel."""
        if self._early is not None:
            self._timed("wait for early updates", self._early.finish)
        with self._lock:
            self._learn_flags()
            self._take_changes()
            assert self.shards is not None and self.round.used is not None
            for bucket in self._reductions if self._early is None else ():
                self._wait_reduced(bucket)
                self.shards.update(bucket, self.round.used)
                self.wire.mark_updated(bucket)
            self._consumed, self._clear = not self._whole, None
            self._end_round(stepped=True)

    def _wait_reduced(self, bucket: int) -> None:
        self._timed(f"wait for the sums of bucket {bucket}", partial(self.wire.wait_reduced, bucket))

    def _end_round(self, stepped: bool) -> None:
        assert self.shards is not None
        self._deferred = self.shards.factor = None
        self.finish_step(stepped)
        self._whole = False
        self._guard()
        self.complete(i for i in self.slots if self._must_hurry(i))

    def _let_go(self) -> None:
        """Ends a round without an update: the parameters travel as they are."""
        if self._early is not None:
            self._early.finish()  # too late to undo: this round's updates are made
        for bucket in self._reductions:
            self.wire.wait_reduced(bucket)
            if self._early is None:
                self.wire.mark_updated(bucket)
        self._end_round(stepped=False)
        self.complete_all()

    def _begin_round(self) -> None:
        if self.phase is Phase.SENT:
            # A second backward without a step adds to the first one's result, as in plain PyTorch.
            if self._early is not None:
                raise ValueError(
                    "with early_step=True every backward is a step; call optimizer.step() after each backward"
                )
            self.gather_gradients()
            self._let_go()
        self.settle()
        if self._consumed:
            raise ValueError(
                "with gather='parameters' step() leaves no gradients that a further backward could add to;"
                " call"
                " optimizer.zero_grad() between step() and the next backward"
            )
        super()._begin_round()
        if self._early is not None:
            self._early.begin()

    def _detach_gradients(self) -> None:
        """The gradients that the user sees stand beside the buckets from now on: these may go, and what is
        added to sums can be told apart from them, as in ``_reduced``.
        """
        for i, param in enumerate(self.params):
            grad = raw_grad(param)
            if grad is not None:
                copy = grad.clone()
                set_raw_grad(param, copy)
                if self.sums and i in self.views:
                    self._kept[i] = Kept.of(copy)

    def _take_changes(self) -> None:
        """What the user has made of gathered gradients counts, also where it stands beside the buckets."""
        if not self._whole:
            return
        assert self.round.used is not None
        for i, view in self.views.items():
            grad = raw_grad(self.params[i])
            if grad is None:
                self.round.used[i] = 0
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)

    def _finish_round(self) -> None:
        for bucket in self._reductions:
            self.wire.wait_reduced(bucket)

    def finish_all(self) -> None:
        if self.phase is not Phase.IDLE:
            self.gather_gradients()
            self._detach_gradients()
            self._let_go()
        self._optimizer.__dict__["state"].update(self.whole_state())

    def discard(self) -> None:
        if self.phase is Phase.FILLING:
            self.seal()
        self._let_go()

    def clear_grads(self, set_to_none: bool) -> None:
        with self._lock:
            super().clear_grads(set_to_none)
            if self._consumed:
                self._consumed = False
                for i, exposed in enumerate(self.round.exposed):
                    if exposed:
                        clear_pending(self.params[i])

    # -- norms and state -------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, from the shards; the update multiplies by the factor."""
        self.refuse_early("clip_grad_norm_()")
        with self._lock:
            self._learn_flags()
            self._take_changes()
            assert self.shards is not None and self.round.used is not None
            for bucket in self._reductions:
                self._wait_reduced(bucket)
            self.shards.scale_gradients()
            grads = self.shards.owned_gradients(self.round.used)
            total = total_norm(grads, norm_type, self.wire.gather_scalars, self.shards.device)
            factor = factor_for(total, max_norm, error_if_nonfinite)
            if self._whole:
                for grad in map(raw_grad, self.params):
                    if grad is not None:
                        grad.mul_(factor)
                self._take_changes()
            else:
                self.shards.factor = factor
            return total.to(reduce(torch.promote_types, (p.dtype for p in self.params), torch.float32))

    def take_state(self) -> None:
        """Cuts the shards' state out of ``optimizer.state``; the state of frozen parameters stays there."""
        assert self.shards is not None
        whole = self._optimizer.__dict__["state"]
        self.shards.take_state(whole)
        for param in self.shards.params:
            whole.pop(param, None)

    def whole_state(self) -> dict[nn.Parameter, dict[str, object]]:
        """The optimizer's state of whole parameters, on every rank. Collective."""
        assert self.shards is not None
        self.settle()
        gathered = self.shards.gathered_state(self.wire.all_values, self.wire.gather_now)
        return {**self._optimizer.__dict__["state"], **gathered}
