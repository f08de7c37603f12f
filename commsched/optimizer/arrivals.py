"""Waits for buckets: completes those that contain a needed gradient or parameter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from commsched.backends.interface import Backend
from commsched.backends.ranks import ranks_text
from commsched.errors import CommError
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.layer_timing import Watch, profiled
from commsched.optimizer.pending import can_pend, clear_pending, has_alias, mark_pending
from commsched.optimizer.step_state import LATE, SPARSE, Phase, StepState
from scheduler.ir.program import Program


class Arrivals:
    """Waits for the current round. ``seal`` ends the filling of its buckets."""

    def __init__(
        self, state: StepState, backend: Backend, gathering: Gathering, seal: Callable[[], None]
    ) -> None:
        self.state, self.backend, self.gathering, self._seal = state, backend, gathering, seal
        self.watch: Watch | None = None
        self.waited = 0.0  # seconds, over all rounds
        gathering.attach(self)
        self._completions = [partial(self.complete, (i,)) for i in range(len(state.params))]
        self._clears = [partial(self.clear_later, i) for i in range(len(state.params))]

    def complete(self, params: Iterable[int]) -> None:
        """Wait for the gradients of these parameters, then apply the deferred update if there is one."""
        state = self.state
        with state.lock:
            if state.phase is Phase.FILLING:
                self._seal()
            if state.phase is Phase.SENT:
                self.gathering.check_readable()
            if state.pending:
                self.complete_buckets(b for i in params if i in state.slots for b in state.slots[i].buckets)

    def complete_all(self) -> None:
        """Wait for all pending gradients and parameters."""
        self.complete(self.state.slots)

    def needed(self, params: Sequence[int]) -> None:
        """Complete these parameters, because a module's forward is about to use them."""
        state = self.state
        if state.phase is Phase.IDLE and not all(state.round.exposed[i] for i in params):
            self.complete(params)

    def complete_buckets(self, buckets: Iterable[int]) -> None:
        """Wait for these buckets and expose every parameter that is in no other pending bucket.

        Its gradient becomes what plain PyTorch shows, and the deferred update is applied to it.
        """
        state = self.state
        with state.lock:
            now = state.round
            self.wait_for_flags()
            touched: dict[int, None] = {}
            for bucket in buckets:
                if not now.done[bucket]:
                    if not self.backend.is_gathered(bucket):
                        self.timed(f"bucket {bucket}", self.backend.wait_gathered, bucket)
                    now.done[bucket] = True
                    touched.update(dict.fromkeys(state.buffers.layout.slices[bucket].params))
            complete = [
                i for i in touched if not now.exposed[i] and all(now.done[b] for b in state.slots[i].buckets)
            ]
            used = [i for i in complete if now.used[i]]
            for i in complete:
                now.exposed[i] = True
                clear_pending(state.params[i])
            for i in used:
                self.gathering.show(i)
            state.pending -= len(complete)
            if state.deferred is not None and used:
                state.deferred(used)
            state.apply_clear(complete)
            self.backend.updates_issued()

    def timed(self, what: str, wait: Callable[..., None], *arguments: int) -> None:
        """Wait and measure the time, which is exposed communication."""
        start = time.monotonic()
        with profiled(f"commsched: wait for {what}"):
            wait(*arguments)
        end = time.monotonic()
        self.waited += end - start
        if self.watch is not None:
            self.watch.wait(start, end)

    def wait_for_flags(self) -> None:
        """Wait until ``round.used`` contains which parameters any rank used in this round."""
        state, now = self.state, self.state.round
        if now.used:
            return
        self.timed("the flags", self.backend.wait_gathered, state.flags_bucket)
        tail = len(state.params) + 1
        now.used = state.flags[: tail + self.backend.ranks.size].tolist()
        self._check_steps(now.used[tail:])
        used = now.used[:tail]
        late = any(flag >= LATE for flag in used)
        if late:
            now.used = used = [flag % LATE for flag in used]
        sparse = [i for i, flag in enumerate(used[:-1]) if flag >= SPARSE and not state.sparse_as_dense]
        if late or sparse:
            self.gathering.reduce_outside(late, sparse)

    def _check_steps(self, stepped: Sequence[int]) -> None:
        """Raise unless all ranks have called ``step()`` since the last round, or none: else they differ."""
        ranks = self.backend.ranks
        if 0 < sum(stepped) < ranks.size:
            did = ranks_text([rank for rank, flag in enumerate(stepped) if flag])
            did_not = ranks_text([rank for rank, flag in enumerate(stepped) if not flag])
            self.gathering.finish_round()  # so that the other ranks raise this error too
            raise CommError(
                f"rank {ranks.rank}: between the last two backward passes {did} called step() and"
                f" {did_not} did not (the flags of round {self.state.rounds} say so); call step() on all"
                " ranks or on none, also on a rank that has no data"
            )

    def mark(self, name: str) -> None:
        if self.watch is not None:
            self.watch.mark(name)

    # -- what may stay on its way ----------------------------------------------------------------------------

    def guard(self, only_grad: bool = False) -> None:
        """From now on complete a parameter before anything accesses it (or its gradient)."""
        for i in self.state.views:
            if not self.state.round.exposed[i] and can_pend(self.state.params[i]):
                clear = None if only_grad else self._clears[i]
                mark_pending(self.state.params[i], self._completions[i], only_grad, clear)

    def clear_later(self, i: int, set_to_none: bool) -> bool:
        """Let the deferred update clear this gradient, after a step; return whether it will."""
        state = self.state
        with state.lock:
            waits = state.phase is Phase.IDLE and not state.round.exposed[i]
            if waits:
                state.clear[i] = set_to_none
            return waits

    def aliased(self) -> list[int]:
        """Return the pending parameters whose memory other tensors share: access to those goes unnoticed."""
        state = self.state
        with torch._C.DisableTorchFunctionSubclass():
            return [
                i
                for i in state.slots
                if not state.round.exposed[i]
                and (not can_pend(state.params[i]) or has_alias(state.params[i], self.gathering.owners(i)))
            ]

    def arrived(self) -> list[int]:
        """Return the buckets that can be completed without waiting."""
        if not self.backend.is_gathered(self.state.flags_bucket):
            return []
        done = self.state.round.done
        return [b for b in range(len(done)) if not done[b] and self.backend.is_gathered(b)]

    def all_arrived(self) -> bool:
        """Return whether nothing needs to be waited for."""
        state = self.state
        return state.phase is Phase.SENT and len(self.arrived()) == state.round.done.count(False) > 0

    def settle(self) -> None:
        """Apply every pending update. Does not affect a running backward."""
        with self.state.lock:
            if self.state.phase is Phase.IDLE:
                self.complete_all()


class Gathering(ABC):
    """The part that differs between ``gather="gradients"`` and ``gather="parameters"``.

    It decides which values are gathered once the gradients are reduced, and how the optimizer steps on them.
    """

    def __init__(self, state: StepState, backend: Backend) -> None:
        self.state, self.backend = state, backend

    def attach(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    def prepare(self, program: Program, buffers: Buffers) -> Buffers | None:
        """Return the parameters' buffers for a new plan, if parameters are gathered. Between two steps."""
        return None

    def installed(self, program: Program) -> None:
        """React to a new plan, which the backend has installed."""

    def owners(self, i: int) -> int:
        """Return how many tensors hold this parameter's memory when no alias exists."""
        return 1

    def before_round(self) -> None:
        """End the former round, or refuse a new one, because a backward begins."""

    def round_begun(self) -> None:
        """React to a new round; buckets may be marked from now on."""

    def check_readable(self) -> None:
        """Raise where a gradient that is being reduced cannot be read."""

    @abstractmethod
    def show(self, i: int) -> None:
        """Set ``p.grad`` of a completed parameter that some rank used."""

    @abstractmethod
    def reduce_outside(self, late: bool, sparse: Sequence[int]) -> None:
        """Reduce gradients that no bucket contained: late and sparse ones."""

    @abstractmethod
    def gather_gradients(self) -> None:
        """Give every rank every reduced gradient. Collective."""

    @abstractmethod
    def step(self, optimizer: Any, synchronous: bool) -> None:
        """Step the optimizer; with ``synchronous`` defer no update."""

    @abstractmethod
    def finish_round(self) -> None:
        """Wait until no other rank needs this rank for the round."""

    def finish_step(self, stepped: bool = True) -> None:
        """End the step, also one that was left out: later gradients belong to the next one."""
        with self.state.lock:
            self.state.finish_step(stepped)
            self.backend.step_ended()

    @abstractmethod
    def discard(self) -> None:
        """End a round without using its result."""

    def cleared(self) -> None:
        """React to the user's ``zero_grad()``."""

    @abstractmethod
    def finish_all(self) -> None:
        """Complete all pending work, so that another reducer can take over; gradients stay."""

    def take_state(self) -> None:
        """Use a state that was loaded into the optimizer."""

    def close(self) -> None:
        """End threads; pending results are lost."""
