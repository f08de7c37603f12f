"""Waits for buckets: completes those that contain a needed gradient or parameter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from commsched.backends.interface import Backend
from commsched.backends.ranks import ranks_text
from commsched.errors import CommError
from commsched.optimizer.gathering import Gathering
from commsched.optimizer.measuring import Watch, profiled
from commsched.optimizer.pending import can_pend, clear_pending, has_alias, mark_pending
from commsched.optimizer.step_state import JOINED, LATE, SPARSE, Phase, StepState

_KEPT_WAITS = 4096  # more than one step has
_KEPT_ROUNDS = 60


class Arrivals:
    """Waits for the current round. ``seal`` ends the filling of its buckets."""

    def __init__(
        self, state: StepState, backend: Backend, gathering: Gathering, seal: Callable[[], None]
    ) -> None:
        self.state, self.backend, self.gathering, self._seal = state, backend, gathering, seal
        self.watch: Watch | None = None
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=_KEPT_WAITS)  # the backend's marks around each
        # Microseconds that each rank waited in its latest step, plus one (0: none yet), of the last rounds.
        self.waits_of_ranks: deque[list[int]] = deque(maxlen=_KEPT_ROUNDS)
        gathering.arrivals = self
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
                        self.timed(state.bucket_names[bucket], self.backend.wait_gathered, bucket)
                    now.done[bucket] = True
                    touched.update(dict.fromkeys(state.buffers.layout.slices[bucket].params))
            complete = [
                i for i in touched if not now.exposed[i] and all(now.done[b] for b in state.slots[i].buckets)
            ]
            used = [i for i in complete if now.used[i]]
            for i in complete:
                now.exposed[i] = True
                clear_pending(state.params[i])
            state.residuals.give_back(set(now.unused).intersection(complete), state.buffers)
            for i in used:
                self.gathering.show(i)
            state.pending -= len(complete)
            if state.deferred is not None and used:
                state.deferred(used)
            state.apply_clear(complete)
            self.backend.updates_issued()

    def timed(self, what: str, wait: Callable[..., None], *arguments: int) -> None:
        """Wait and measure the time, which is exposed communication."""
        mark, start = self.backend.now(), time.monotonic()
        with profiled(f"commsched wait {what}"):
            wait(*arguments)
        self._waits.append((mark, self.backend.now()))
        if self.watch is not None:
            self.watch.wait(start, time.monotonic())

    def take_waits(self) -> list[tuple[Any, Any]]:
        """Return the backend's marks before and after each wait since the last call."""
        waits = list(self._waits)
        self._waits.clear()
        return waits

    def wait_for_flags(self) -> None:
        """Wait until ``round.used`` contains which parameters any rank used in this round."""
        state, now = self.state, self.state.round
        if now.used:
            return
        self.timed("flags", self.backend.wait_gathered, state.flags_bucket)
        places, flags = state.places, state.flags[: state.places.size].tolist()
        now.used = used = flags[: places.votes + 1]
        stepped = dict(enumerate(flags[places.steps : places.samples]))
        before, now.joined = state.joined, [r for r, flag in stepped.items() if flag == JOINED]
        state.joined = now.joined
        self.waits_of_ranks.append(flags[places.waits :])
        self._check_steps({r: flag for r, flag in stepped.items() if flag != JOINED}, bool(before))
        self._weigh(flags[places.samples], flags[places.unweighted])
        late = any(flag >= LATE for flag in used)
        if late:
            now.used = used = [flag % LATE for flag in used]
        sparse = [i for i, flag in enumerate(used[:-1]) if flag >= SPARSE and not state.sparse_as_dense]
        only_sparse = {i for i in sparse if used[i] % SPARSE == 0}
        now.unused = [i for i in state.residuals.params if not used[i] or i in only_sparse]
        if late or sparse:
            self.gathering.reduce_outside(late, sparse)

    def _check_steps(self, stepped: Mapping[int, int], some_joined: bool) -> None:
        """Raise unless all ranks have called ``step()`` since the last round, or none: else they differ.

        Where ranks had joined by the last round, and took a step after it, none is an error, too.
        """
        ranks = self.backend.ranks
        if some_joined and self.gathering.steps_after_each_round and stepped and not any(stepped.values()):
            self.gathering.finish_round()
            raise CommError(
                f"rank {ranks.rank}: some ranks have joined, and between the last two backward passes"
                f" {ranks_text(sorted(stepped))} did not call step(); after join() on any rank, call step()"
                " after each backward pass (accumulate with set_backward_passes_per_step() or no_sync())"
            )
        if 0 < sum(stepped.values()) < len(stepped):
            did = ranks_text([rank for rank, flag in stepped.items() if flag])
            did_not = ranks_text([rank for rank, flag in stepped.items() if not flag])
            self.gathering.finish_round()  # so that the other ranks raise this error too
            raise CommError(
                f"rank {ranks.rank}: between the last two backward passes {did} called step() and"
                f" {did_not} did not (the flags of round {self.state.rounds} say so); call step() on all"
                " ranks or on none, also on a rank that has no data"
            )

    def _weigh(self, samples: int, unweighted: int) -> None:
        """Let gradients be sums over samples, which are to be divided by the samples of all ranks."""
        ranks = self.backend.ranks
        if samples and unweighted:
            self.gathering.finish_round()  # as above
            raise CommError(
                f"rank {ranks.rank}: in round {self.state.rounds} {unweighted} of {ranks.size} ranks had"
                " gradients of a loss that was not passed through optimizer.weighted(), and the others"
                f" counted {samples} samples; call weighted() on all ranks or on none"
            )
        if samples:
            self.gathering.weigh(ranks.size / samples)

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
