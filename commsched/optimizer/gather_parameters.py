"""``gather="parameters"``: gradients are only reduced, each rank updates its shards and gathers parameters.

No rank holds a whole gradient after ``backward()``. Reading ``p.grad`` is an error unless ``synchronize()``
has gathered the gradients, and a step leaves no gradients to which a further backward could add.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from commsched.backends.interface import Backend
from commsched.optimizer import sharded_errors as refusals
from commsched.optimizer.absent_ranks import AbsentRanks, options_of, share_options
from commsched.optimizer.arrivals import Arrivals
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.clipping import factor_for, total_norm
from commsched.optimizer.early_update import EarlyUpdates
from commsched.optimizer.gathering import Gathering
from commsched.optimizer.pending import can_pend, clear_pending, mark_pending, raw_grad, set_raw_grad
from commsched.optimizer.residuals import State
from commsched.optimizer.shards import Shards, check_elementwise
from commsched.optimizer.step_state import Phase, StepState
from commsched.optimizer.whole_matrix import WHOLE
from scheduler.ir.actions import Kind
from scheduler.ir.program import Program


class ParameterGathering(Gathering):
    arrivals: Arrivals
    shards: Shards
    spreads_state = True

    def __init__(self, state: StepState, backend: Backend, optimizer: Any, masters: bool) -> None:
        super().__init__(state, backend)
        if optimizer._base not in WHOLE:
            check_elementwise(optimizer._base)
        backend.ranks.agree("master_weights", str(masters), "pass the same arguments on every rank")
        for name, param in zip(state.names, state.params, strict=True):
            if not can_pend(param):
                raise refusals.own_class(name, type(param).__name__)
        # The optimizer owns this object: a strong reference back would be a cycle that delays their end.
        self._optimizer, self._masters = weakref.proxy(optimizer), masters
        self._rank = backend.ranks.rank
        self.absent = AbsentRanks(state, backend.ranks)
        self._whole = False  # the user has had this round's gradients gathered
        self._consumed = False  # the last step left no gradients
        self._refusals = [partial(self._refuse, i) for i in range(len(state.params))]
        self._pardons = [partial(self._forgive, i) for i in range(len(state.params))]
        self._buckets: list[int] = []  # in the order of their RS
        self._early: EarlyUpdates | None = None

    # -- plans -----------------------------------------------------------------------------------------------

    def prepare(self, program: Program, buffers: Buffers) -> Buffers:
        if program.early_step and not self.backend.can_step_early:
            raise refusals.early_on_gpu()
        if self._buckets:
            self._keep_shards()
        ranks, params = self.backend.ranks, self.state.params
        self.shards = Shards(self._optimizer, params, buffers, ranks.rank, ranks.size, self._masters)
        self.shards.take_state(self._optimizer.__dict__["state"])
        return self.shards.buffers

    def installed(self, program: Program) -> None:
        self.close()
        self._buckets = [action.index for action in program.link if action.kind is Kind.RS]
        with torch._C.DisableTorchFunctionSubclass():
            storages = {i: self.state.params[i].untyped_storage() for i in self.state.slots}
            self._owners = {i: int(torch._C._storage_Use_Count(s._cdata)) - 1 for i, s in storages.items()}
        if program.early_step:
            self._early = EarlyUpdates(self._update_early, self._buckets)

    def close(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None

    def owners(self, i: int) -> int:
        return self._owners[i]

    # -- a round ---------------------------------------------------------------------------------------------

    def before_round(self) -> None:
        state = self.state
        if state.phase is Phase.SENT:
            # A second backward without a step adds to the first one's result.
            if self._early is not None:
                raise refusals.early_accumulation()
            self.gather_gradients()
            self.discard()
        self.arrivals.settle()
        if self._consumed and any(state.round.used[i] and i not in state.clear for i in state.slots):
            raise refusals.no_gradients_left()
        self._consumed = False

    def round_begun(self) -> None:
        self.shards.factor = None  # a discarded round may have left it
        if self._early is not None:
            self._early.begin()

    def weigh(self, factor: float) -> None:
        self.shards.factor = torch.tensor(factor, dtype=torch.float64, device=self.shards.device)

    def reduce_outside(self, late: bool, sparse: Sequence[int]) -> None:
        if late:
            raise refusals.late_gradient(self._rank)
        raise refusals.sparse_gradient(self.state.names[sparse[0]])

    def finish_round(self) -> None:
        for bucket in self._buckets:
            self.backend.wait_reduced(bucket)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        return self._whole

    def check_readable(self) -> None:
        if not self.readable:
            raise refusals.not_gathered(self._rank)

    def show(self, i: int) -> None:
        if self._consumed and i not in self.state.clear:
            mark_pending(self.state.params[i], self._refusals[i], True, self._pardons[i])

    def _forgive(self, i: int, set_to_none: bool) -> bool:
        """Let ``Module.zero_grad`` clear the gradient that the step has consumed."""
        clear_pending(self.state.params[i])
        self.state.clear[i] = set_to_none
        return True

    def _refuse(self, i: int) -> None:
        raise refusals.gradient_gone(self._rank, self.state.names[i])

    def refuse_early(self, what: str) -> None:
        """Raise for calls that need all gradients before the update: ``early_step`` does not wait."""
        if self._early is not None:
            raise refusals.before_early_step(what)

    def gather_gradients(self) -> None:
        self.refuse_early("synchronize()")
        state = self.state
        with state.lock:
            if self._whole or state.phase is not Phase.SENT:
                return
            self._wait_all_reduced()
            self.absent.check_none("synchronize()")
            self.shards.scale_gradients()
            for bucket in range(state.flags_bucket):
                ends = state.buffers.layout.slices[bucket].ends
                self.backend.gather_now(state.buffers.bucket(bucket), ends)
            self._whole = True
            for i, view in state.views.items():
                clear_pending(state.params[i])
                set_raw_grad(state.params[i], view if state.round.used[i] else None)
            if state.sums:
                self.state.detach_gradients()

    def _take_changes(self) -> None:
        """Use changes that the user made to gathered gradients, also in tensors outside of the buckets."""
        if self._whole:
            for i, view in self.state.views.items():
                grad = raw_grad(self.state.params[i])
                if grad is None:
                    self.state.round.used[i] = 0
                elif grad.data_ptr() != view.data_ptr():
                    view.copy_(grad)

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, optimizer: Any, synchronous: bool) -> None:
        """Update each bucket's shard once it is reduced, and start the all-gather of its parameters."""
        state, arrivals = self.state, self.arrivals
        arrivals.mark("step")
        if self._early is not None:
            arrivals.timed("early updates", self._early.finish)
        with state.lock:
            arrivals.wait_for_flags()
            self.absent.tell("step", options_of(self._optimizer))
            self._take_changes()
            for bucket in self._buckets if self._early is None else ():
                self._wait_reduced(bucket)
                self.shards.update(bucket, state.round.used)
                self.backend.mark_updated(bucket)
            self._consumed, state.clear = not self._whole, {}
            self._end_round(stepped=True)
        if synchronous:
            arrivals.settle()

    # -- ranks that have joined ------------------------------------------------------------------------------

    def check_can_join(self) -> None:
        self.refuse_early("join()")

    def follow(self) -> bool | None:
        return self.absent.follow(self, self._optimizer)

    def share(self, optimizer: Any, root: int) -> None:
        share_options(optimizer, root, self.backend.ranks)  # every rank's shards are up to date

    def _wait_reduced(self, bucket: int) -> None:
        self.arrivals.timed(f"the sums of bucket {bucket}", self.backend.wait_reduced, bucket)

    def _wait_all_reduced(self) -> None:
        self.arrivals.wait_for_flags()
        for bucket in self._buckets:
            self._wait_reduced(bucket)

    def _update_early(self, bucket: int) -> None:
        """Update in the thread of the early updates, which must not take the state's lock."""
        state, backend = self.state, self.backend
        backend.wait_reduced(bucket)
        backend.wait_gathered(state.flags_bucket + 1 + bucket)
        params = state.buffers.layout.slices[bucket].params
        self.shards.update(bucket, dict(zip(params, state.early_flags[bucket].tolist(), strict=False)))
        backend.mark_updated(bucket)

    def _end_round(self, stepped: bool) -> None:
        self.state.deferred = self.shards.factor = None
        self.finish_step(stepped)
        self._whole = False
        self.arrivals.guard()
        self.arrivals.complete(self.arrivals.aliased())

    def discard(self) -> None:
        """End the round without an update."""
        if self._early is not None:
            self._early.finish()  # this round's updates are made and cannot be undone
        else:
            self.arrivals.wait_for_flags()
            self.absent.tell("discard")
        for bucket in self._buckets:
            self.backend.wait_reduced(bucket)
            if self._early is None:
                self.backend.mark_updated(bucket)
        self._end_round(stepped=False)
        self.arrivals.complete_all()

    def finish_all(self) -> None:
        if self.state.phase is not Phase.IDLE:
            self.gather_gradients()
            self.state.detach_gradients()
            self.discard()
        self._keep_shards()
        self.state.residuals.keep()

    def cleared(self) -> None:
        if self._consumed:
            self._consumed = False
            for i, exposed in enumerate(self.state.round.exposed):
                if exposed:
                    clear_pending(self.state.params[i])

    # -- norms and state -------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip like ``torch.nn.utils.clip_grad_norm_``, from the shards; updates multiply by the factor."""
        self.refuse_early("clip_grad_norm_()")
        state, shards = self.state, self.shards
        with state.lock:
            self._wait_all_reduced()
            self.absent.tell("clip", (max_norm, norm_type, error_if_nonfinite))
            self._take_changes()
            shards.scale_gradients()
            grads = shards.owned_gradients(state.round.used)
            total = total_norm(grads, norm_type, self.backend.gather_scalars, shards.device)
            factor = factor_for(total, max_norm, error_if_nonfinite)
            if not self._whole:
                shards.factor = factor
            for grad in map(raw_grad, state.params) if self._whole else ():
                if grad is not None:
                    grad.mul_(factor)
            self._take_changes()
            return total.to(reduce(torch.promote_types, (p.dtype for p in state.params), torch.float32))

    def take_state(self) -> None:
        super().take_state()
        self.shards.take_state(self._optimizer.__dict__["state"])

    def whole_state(self, state: State) -> State:
        self.absent.check_none("state_dict()")
        return super().whole_state({**state, **self._gathered_shards()})

    def _gathered_shards(self) -> State:
        self.arrivals.settle()
        return self.shards.gathered_state(self.backend.ranks.all_values, self.backend.gather_now)

    def _keep_shards(self) -> None:
        """Put the state of whole parameters into the optimizer, on every rank. Collective."""
        self._optimizer.__dict__["state"].update(self._gathered_shards())
