"""Waits for buckets: whoever needs a gradient or a parameter completes the buckets that it is in."""

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
    """The ways to wait for the round under way. ``seal`` ends its backward."""

    def __init__(
        self, state: StepState, backend: Backend, gathering: Gathering, seal: Callable[[], None]
    ) -> None:
        self.state, self.backend, self.gathering, self._seal = state, backend, gathering, seal
        self.watch: Watch | None = None
        self.waited = 0.0  # seconds, over all rounds
        gathering.attach(self)
        self._completions = [partial(self.complete, (i,)) for i in range(len(state.params))]

    def complete(self, params: Iterable[int]) -> None:
        """Waits for the gradients of these parameters, then applies the deferred update if there is one."""
        state = self.state
        with state.lock:
            if state.phase is Phase.FILLING:
                self._seal()
            if state.phase is Phase.SENT:
                self.gathering.check_readable()
            if state.pending:
                self.complete_buckets(b for i in params if i in state.slots for b in state.slots[i].buckets)

    def complete_all(self) -> None:
        """Waits for everything that is on its way."""
        self.complete(self.state.slots)

    def needed(self, params: Sequence[int]) -> None:
        """A module's forward is about to use these parameters."""
        state = self.state
        if state.phase is Phase.IDLE and not all(state.round.exposed[i] for i in params):
            self.complete(params)

    def complete_buckets(self, buckets: Iterable[int]) -> None:
        """Waits for these buckets and exposes every parameter that has no part in a pending one: its gradient
        becomes what plain PyTorch shows, and the deferred update is applied to it.
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
        """Waits and takes the time: this is the communication that nothing hides."""
        start = time.monotonic()
        with profiled(f"commsched: wait for {what}"):
            wait(*arguments)
        end = time.monotonic()
        self.waited += end - start
        if self.watch is not None:
            self.watch.wait(start, end)

    def wait_for_flags(self) -> None:
        """Afterwards ``round.used`` says which parameters any rank used in this round."""
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
        """All ranks have called ``step()`` since the last round, or none has; else they differ by now."""
        ranks = self.backend.ranks
        if 0 < sum(stepped) < ranks.size:
            did = ranks_text([rank for rank, flag in enumerate(stepped) if flag])
            did_not = ranks_text([rank for rank, flag in enumerate(stepped) if not flag])
            self.gathering.finish_round()  # so that the other ranks find out too, before this one ends
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
        """Whoever touches a parameter (or its gradient) from now on completes it first."""
        for i in self.state.views:
            if not self.state.round.exposed[i] and can_pend(self.state.params[i]):
                mark_pending(self.state.params[i], self._completions[i], only_grad)

    def aliased(self) -> list[int]:
        """The pending parameters whose memory somebody could see without being noticed."""
        state = self.state
        with torch._C.DisableTorchFunctionSubclass():
            return [
                i
                for i in state.slots
                if not state.round.exposed[i]
                and (not can_pend(state.params[i]) or has_alias(state.params[i], self.gathering.owners(i)))
            ]

    def arrived(self) -> list[int]:
        """The buckets that could be completed without waiting."""
        if not self.backend.is_gathered(self.state.flags_bucket):
            return []
        done = self.state.round.done
        return [b for b in range(len(done)) if not done[b] and self.backend.is_gathered(b)]

    def all_arrived(self) -> bool:
        """Whether nothing needs to be waited for."""
        state = self.state
        return state.phase is Phase.SENT and len(self.arrived()) == state.round.done.count(False) > 0

    def settle(self) -> None:
        """Applies every update that is still on its way. Does not affect a running backward."""
        with self.state.lock:
            if self.state.phase is Phase.IDLE:
                self.complete_all()


class Gathering(ABC):
    """What differs between ``gather="gradients"`` and ``gather="parameters"``: what travels back once the
    gradients are reduced, and how the optimizer steps on it.
    """

    def __init__(self, state: StepState, backend: Backend) -> None:
        self.state, self.backend = state, backend

    def attach(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    def prepare(self, program: Program, buffers: Buffers) -> Buffers | None:
        """The parameters' buffers for a new plan, where it gathers parameters. Between two steps."""
        return None

    def installed(self, program: Program) -> None:
        """The backend has taken over the new plan."""

    def owners(self, i: int) -> int:
        """How many tensors hold this parameter's memory when no alias exists."""
        return 1

    def before_round(self) -> None:
        """A backward begins. Ends the round before it, or refuses the new one."""

    def round_begun(self) -> None:
        """Marks may follow from now on."""

    def check_readable(self) -> None:
        """Raises where a gradient that is being reduced cannot be read."""

    @abstractmethod
    def show(self, i: int) -> None:
        """Sets ``p.grad`` of a completed parameter that some rank used."""

    @abstractmethod
    def reduce_outside(self, late: bool, sparse: Sequence[int]) -> None:
        """Reduces what the buckets did not carry: gradients that came late, and sparse ones."""

    @abstractmethod
    def gather_gradients(self) -> None:
        """Gives every rank every reduced gradient. Collective."""

    @abstractmethod
    def step(self, optimizer: Any, synchronous: bool) -> None:
        """The optimizer's step; ``synchronous``: nothing is left to be done later."""

    @abstractmethod
    def finish_round(self) -> None:
        """Waits until the other ranks need nothing more of this rank."""

    def finish_step(self, stepped: bool = True) -> None:
        """The step is over, or left out: later gradients belong to the next one."""
        with self.state.lock:
            self.state.finish_step(stepped)
            self.backend.step_ended()

    @abstractmethod
    def discard(self) -> None:
        """Ends a round whose result nobody wants."""

    def cleared(self) -> None:
        """The user has called ``zero_grad()``."""

    @abstractmethod
    def finish_all(self) -> None:
        """Ends everything that is on its way, so that another reducer can take over; gradients stay."""

    def take_state(self) -> None:
        """A new state has been loaded into the optimizer."""

    def close(self) -> None:
        """Ends threads; what was on its way is lost."""
