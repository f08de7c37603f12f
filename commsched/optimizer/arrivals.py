"""Where gradients and parameters arrive: whoever needs one completes the buckets it stands in.

The base of ``Flow``: it knows buckets, the round under way and the deferred update; ``flow`` adds how
gradients get in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import nn

from commsched.backends.cpu import Wire, ranks_text
from commsched.errors import CommError
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.gradients import clear_raw_grad, raw_grad, set_raw_grad
from commsched.optimizer.layer_timing import Watch, profiled
from commsched.optimizer.pending import can_pend, clear_pending, has_alias, mark_pending
from commsched.optimizer.step_state import LATE, SPARSE, Kept, Round
from scheduler.ir.program import Program

Update = Callable[[list[int]], None]
"""Applies the optimizer to the parameters with these indices."""

_as_plain = torch._C.DisableTorchFunctionSubclass


class Phase(Enum):
    IDLE = "no gradient has arrived since the last step"
    FILLING = "a backward is under way"
    SENT = "the backward is over, its gradients are being reduced"


class Arrivals:
    """Buckets, the round under way, and the ways to wait for it."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], wire: Wire, sums: bool) -> None:
        self.params = list(params)
        self.names = list(names)
        self.wire = wire
        self.sums = sums
        self.backward_passes = 1
        self.paused = False
        self.phase = Phase.IDLE
        self.pending = 0  # parameters that are not exposed yet
        self.rounds = 0
        self.watch: Watch | None = None
        self.waited = 0.0  # seconds, over all rounds
        self._lock = threading.RLock()
        self._deferred: Update | None = None
        self._clear: str | None = None
        self._stepped = False  # since the last round
        self._passes = [0] * len(self.params)
        self._kept: dict[int, Kept] = {}
        self.sparse_as_dense = False  # sparse gradients travel in the dense buckets
        self.sparse_dims: dict[int, int] = {}  # with how many sparse dimensions they came
        self._completions = [partial(self.complete, (i,)) for i in range(len(self.params))]

    def install(self, program: Program, buffers: Buffers, gathered: Buffers | None = None) -> None:
        """Takes new buckets into use, between two steps. Gradients that are there keep their values."""
        with self._lock:
            if hasattr(self, "buffers"):
                self.complete_all()
            before = getattr(self, "views", {})
            self.program, self.buffers = program, buffers
            self.slots = buffers.layout.slots
            self.views = {i: buffers.view(self.params[i], slot) for i, slot in self.slots.items()}
            for i, view in self.views.items():
                grad = raw_grad(self.params[i])
                if i in self._kept:
                    view.copy_(before[i])
                elif grad is not None and not grad.is_sparse:
                    view.copy_(grad)
                    set_raw_grad(self.params[i], view)
            self.flags = self.wire.install(program, buffers, len(self.params) + 1 + self.wire.size, gathered)
            self._flag = self.flags.numpy()  # the same memory; an element of a tensor costs microseconds
            self.round = Round.finished(buffers.layout, len(self.params))

    # -- completion ------------------------------------------------------------------------------------------

    def seal(self) -> None:
        raise NotImplementedError

    def complete(self, params: Iterable[int]) -> None:
        """Waits for the gradients of these parameters, then applies the deferred update if there is one."""
        with self._lock:
            if self.phase is Phase.FILLING:
                self.seal()
            if self.pending:
                self.complete_buckets(b for i in params if i in self.slots for b in self.slots[i].buckets)

    def needed(self, params: Sequence[int]) -> None:
        """A module's forward is about to use these parameters."""
        if self.phase is Phase.IDLE and not all(self.round.exposed[i] for i in params):
            self.complete(params)

    def complete_all(self) -> None:
        """Waits for everything that is on its way."""
        self.complete(self.slots)

    def gather_gradients(self) -> None:
        """Every rank gets every reduced gradient."""
        self.complete_all()

    def complete_buckets(self, buckets: Iterable[int]) -> None:
        """Waits for these buckets and exposes every parameter that stands in no other one."""
        with self._lock:
            now = self.round
            self._learn_flags()
            touched: dict[int, None] = {}
            for bucket in buckets:
                if not now.done[bucket]:
                    self._wait(bucket)
                    now.done[bucket] = True
                    touched.update(dict.fromkeys(self.buffers.layout.slices[bucket].params))
            finished = [
                i for i in touched if not now.exposed[i] and all(now.done[b] for b in self.slots[i].buckets)
            ]
            if finished:
                self._expose(finished)

    def _wait(self, bucket: int) -> None:
        """Waits for a bucket and takes the time: this is the communication that nothing hid."""
        if self.wire.is_gathered(bucket):
            return
        self._timed(f"wait for bucket {bucket}", partial(self.wire.wait_gathered, bucket))

    def _timed(self, name: str, wait: Callable[[], None]) -> None:
        start = time.monotonic()
        with profiled(f"commsched: {name}"):
            wait()
        end = time.monotonic()
        self.waited += end - start
        if self.watch is not None:
            self.watch.wait(start, end)

    def _learn_flags(self) -> None:
        """Which parameters any rank used in this round."""
        now = self.round
        if now.used is not None:
            return
        self._timed("wait for the flags", self.wire.wait_flags)
        # One flag for each parameter, then the votes for a new plan, then one for each rank that has stepped.
        tail = len(self.params) + 1
        used = self.flags[: tail + self.wire.size].tolist()
        self._check_steps(used[tail:])
        now.used = used
        if any(flag >= LATE for flag in now.used):
            self._reduce_late()
        for i, flag in enumerate(now.used[: len(self.params)]):
            if flag % LATE >= SPARSE and not self.sparse_as_dense:
                now.sparse[i] = self.wire.reduce_sparse(
                    now.sparse.get(i), self.views[i], self.names[i], mean=not self.sums
                )

    def _finish_round(self) -> None:
        raise NotImplementedError

    def _check_steps(self, stepped: Sequence[int]) -> None:
        """All ranks have called ``step()`` since the last round, or none has; else they differ by now."""
        if 0 < sum(stepped) < self.wire.size:
            did = ranks_text([rank for rank, flag in enumerate(stepped) if flag])
            did_not = ranks_text([rank for rank, flag in enumerate(stepped) if not flag])
            self._finish_round()  # so that the others come to know it too, before this rank ends
            raise CommError(
                f"rank {self.wire.rank}: between the last two backward passes {did} called step() and"
                f" {did_not} did not (the flags of round {self.rounds} say so); call step() on all ranks or"
                " on none, also on a rank that has no data"
            )

    def _reduce_late(self) -> None:
        """A second round, for gradients that came when their bucket had been sent, in the same backward."""
        now = self.round
        used = list(now.used or [])
        for bucket in range(len(now.done)):
            self.wire.wait_gathered(bucket)
        with torch.no_grad():
            for i, view in self.views.items():
                view.mul_(self.wire.carry_factor)
                if i in now.late:
                    view.add_(now.late[i].to_dense() if now.late[i].is_sparse else now.late[i])
        self.flags.zero_()
        self.wire.begin_step()
        for bucket in range(len(now.done)):
            self.wire.mark_ready(bucket)
        self.wire.mark_flags_ready()
        self.wire.wait_flags()
        now.used = [flag % LATE for flag in used]

    def _expose(self, params: list[int]) -> None:
        """The gradients of these parameters are there: ``p.grad`` is what plain PyTorch shows, updates are
        applied.
        """
        used = self.round.used
        assert used is not None
        updated = []
        for i in params:
            self.round.exposed[i] = True
            clear_pending(self.params[i])
            if used[i] and self._show(i):
                updated.append(i)
        self.pending -= len(params)
        if self._deferred is not None and updated:
            self._deferred(updated)
        self._apply_clear(params)

    def _show(self, i: int) -> bool:
        """Lets the user see the gradient; whether it is there to be applied."""
        set_raw_grad(self.params[i], self._reduced(i))
        return True

    def _reduced(self, i: int) -> torch.Tensor:
        assert self.round.used is not None
        only_sparse = self.round.used[i] % SPARSE == 0  # no rank's gradient was dense
        sparse = self.round.sparse.get(i)
        if self.sparse_as_dense and only_sparse:
            sparse = self.views[i].to_sparse(self.sparse_dims.get(i, 1))
        if sparse is not None:
            if only_sparse:
                if self.sums:
                    self._kept[i] = Kept.of(sparse)
                return sparse
            self.views[i].add_(sparse)  # other ranks' gradients were dense: they are in the bucket
        if not self.sums:
            return self.views[i]
        # What accumulates on top of a sum must be told apart from it (see ``_only_new``), so the sum itself
        # stays in the slot.
        copy = self.views[i].clone()
        self._kept[i] = Kept.of(copy)
        return copy

    def _apply_clear(self, params: Iterable[int]) -> None:
        """Does what ``zero_grad`` asked for while these were pending."""
        if self._clear is not None:
            for i in params:
                if clear_raw_grad(self.params[i], self._clear == "none"):
                    self._kept.pop(i, None)

    # -- the optimizer's side --------------------------------------------------------------------------------

    def require_sent(self) -> None:
        """Makes sure that a round is under way: without a backward, whatever ``p.grad`` holds is reduced."""
        with self._lock:
            if self.phase is not Phase.SENT:
                self.seal()

    def defer(self, update: Update) -> None:
        """Takes over the update of every parameter: at once where the gradient is there, on completion
        elsewhere.
        """
        with self._lock:
            self._deferred, self._clear = update, None
            self.finish_step()
            here = [i for i in range(len(self.params)) if self.round.exposed[i]]
            if here:
                update(here)
            self._guard()
            hurry = {
                b
                for i in self.slots
                if not self.round.exposed[i] and self._must_hurry(i)
                for b in self.slots[i].buckets
            }
            due = sorted(hurry | set(self._arrived()))
            if due:  # else not even the flags are waited for
                self.complete_buckets(due)

    def all_arrived(self) -> bool:
        """Whether nothing needs to be waited for."""
        return self.phase is Phase.SENT and len(self._arrived()) == self.round.done.count(False) > 0

    def settle(self) -> None:
        """Applies every update that is still on its way; a backward under way is none of its business."""
        with self._lock:
            if self.phase is Phase.IDLE:
                self.complete_all()

    def close(self) -> None:
        """Parameters are ordinary again; what was on its way is lost."""
        for param in self.params:
            clear_pending(param)

    def _must_hurry(self, i: int) -> bool:
        """Whether somebody could see this parameter's memory without being noticed."""
        with _as_plain():
            return not can_pend(self.params[i]) or has_alias(self.params[i], self._storage_owners(i))

    def _storage_owners(self, i: int) -> int:
        """How many tensors hold this parameter's memory when nobody else does."""
        return 1

    def _arrived(self) -> list[int]:
        if not self.wire.flags_arrived():
            return []
        return [b for b, done in enumerate(self.round.done) if not done and self.wire.is_gathered(b)]

    def finish_step(self, stepped: bool = True) -> None:
        """The step is over, or left out: what comes now belongs to the next one."""
        with self._lock:
            self._stepped = stepped
            self.phase = Phase.IDLE
            self._passes = [0] * len(self.params)

    def clear_grads(self, set_to_none: bool) -> None:
        """``zero_grad``: of what is pending, later; of a round nobody stepped on, by forgetting it."""
        with self._lock:
            if self.phase is not Phase.IDLE:
                self.discard()
            self._passes = [0] * len(self.params)
            self._clear = "none" if set_to_none else "zero"
            self._apply_clear(i for i, exposed in enumerate(self.round.exposed) if exposed)

    def discard(self) -> None:
        """Ends a round whose result nobody wants."""
        if self.phase is Phase.FILLING:
            self.seal()
        self.complete_all()
        self.finish_step(stepped=False)

    def _guard(self, only_grad: bool = False) -> None:
        """Whoever touches a parameter from now on completes it first."""
        for i in self.views:
            if not self.round.exposed[i] and can_pend(self.params[i]):
                mark_pending(self.params[i], self._completions[i], only_grad)
