"""Moves gradients from autograd's hook into a bucket, and the bucket to the backend.

Threads: hooks and ``seal`` run on the thread that runs the backward, completions on any thread that accesses
a parameter; ``StepState.lock`` guards all state. The engine's thread never enters Python. ``docs/engine.md``
describes which part owns a buffer at what time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from commsched.backends.interface import Backend, step_work
from commsched.optimizer.arrivals import Arrivals
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.filling import Filling
from commsched.optimizer.gathering import Gathering
from commsched.optimizer.nested_backwards import inside_a_backward
from commsched.optimizer.pending import can_pend, clear_pending, raw_grad, release_class, set_raw_grad
from commsched.optimizer.step_state import JOINED, FlagPlaces, Phase, Round, StepState
from scheduler.ir.program import Program


class Reducer:
    """The gradients of one optimizer, from one step to the next."""

    def __init__(self, state: StepState, backend: Backend, gathering: Gathering) -> None:
        self.state, self.backend, self.gathering = state, backend, gathering
        self.params = state.params
        state.places = FlagPlaces.of(len(self.params), backend.ranks.size)
        self.arrivals = Arrivals(state, backend, gathering, self.seal)
        self.filling, self.paused = Filling(state, backend), False
        # Nothing is sent before the end of the backward; so in the first round, to see what fires twice.
        self.hold = True
        self.joined = False  # this rank takes part with zeros until every rank has joined
        self.samples = 0  # that weighted losses have counted since the last round
        self.vote = 0  # this rank's votes for a new plan
        self.votes = 0  # those of all ranks in the last round but one: the same number on every rank
        self.waited = 0  # what this rank's entry of ``waits_of_ranks`` will be
        self._callback_queued = False

    def install(self, program: Program, buffers: Buffers) -> None:
        """Take a new plan and new buckets into use, between two steps."""
        state, size = self.state, self.backend.ranks.size
        with state.lock:
            if state.views:
                self.arrivals.complete_all()
            state.residuals.install(buffers)
            gathered, lost = self.gathering.prepare(program, buffers), state.residuals.by_bucket()
            state.corrections.install(buffers, self.params)
            changed = state.corrections.changed
            work = step_work(
                program, buffers, state.places.size, size, gathered, state.scaling, lost, changed
            )
            state.install(buffers, work.flags)
            self.backend.install(work)
            self.gathering.installed(program)

    # -- gradients in ----------------------------------------------------------------------------------------

    def on_grad(self, i: int, param: nn.Parameter) -> None:
        """React to a gradient that autograd has accumulated into parameter ``i``."""
        if self.arrivals.watch is not None:
            self.arrivals.watch.grad(i)
        if self.paused:
            return
        state = self.state
        with state.lock:
            # Without a call where nothing is pending: every gradient passes here.
            grad = param.grad if type(param) is nn.Parameter else raw_grad(param)
            if grad is None:  # though autograd has just put it there
                raise ValueError(
                    f"somebody took the gradient of {state.names[i]} before it could be reduced: a hook that"
                    " clears gradients, or another DistributedOptimizer over the same parameters (call that"
                    " one's close() first)"
                )
            state.passes[i] += 1
            if state.passes[i] < state.backward_passes:
                state.keep_in_place(i, grad)
                return
            if state.phase is not Phase.FILLING:
                grad = self._open(i, grad)
            if not self._callback_queued:
                self._await_end()
            if state.round.filled[i]:
                self.filling.fill_again(i, grad)
                return
            self.filling.fill(i, grad)
            tied = state.corrections.buckets
            whole = i not in tied or i in state.corrections.early
            if not self.hold and whole and i in state.slots and i not in self.filling.fired_twice:
                self._send(tied[i] if i in tied else state.slots[i].buckets)
            # Else the end of the backward sends it.

    def on_part(self, i: int, part: torch.Tensor) -> None:
        """React to the head's part of a tied weight's gradient; autograd adds the embedding's part later."""
        state = self.state
        with state.lock:
            if self.paused or state.passes[i] + 1 < state.backward_passes or i not in state.corrections:
                return
            if state.phase is not Phase.FILLING:
                self._begin_round()
            if not self._callback_queued:
                self._await_end()
            # A second part, or an earlier gradient to which autograd adds both: the whole one is sent.
            if state.round.filled[i] or i in state.corrections.early or raw_grad(self.params[i]) is not None:
                return
            state.corrections.take_part(i, part, state.views[i])
            if not self.hold:
                self._send(state.corrections.heads[i])

    def _await_end(self) -> None:
        """Let autograd tell when this backward ends."""
        self._callback_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def _open(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """Start a round, after all that is on its way. Returns the gradient that parameter ``i`` has then.

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

    def _begin_round(self) -> None:
        state = self.state
        self.gathering.before_round()
        self.arrivals.complete_all()
        unawaited = [bucket for bucket in state.empty if not state.round.done[bucket]]
        if unawaited:  # no parameter has waited for these
            self.arrivals.complete_buckets(unawaited)
        state.deferred, state.clear = None, {}
        self.votes = state.round.used[state.places.votes] if state.rounds and state.round.used else 0
        state.round = Round(state.buffers.layout, len(self.params))
        state.corrections.begin()
        state.flags.zero_()
        self.backend.begin_step()
        state.phase = Phase.FILLING
        self._callback_queued = False  # a backward that raised never ran its callback
        self.gathering.round_begun()
        self._send(state.empty)  # later buckets would wait for them

    def _send(self, buckets: Iterable[int]) -> None:
        """Send those of these buckets, each with one gradient more, that are complete now."""
        state, missing = self.state, self.state.round.missing
        for bucket in buckets:
            missing[bucket] -= 1
            if missing[bucket]:
                continue
            state.round.sent[bucket] = True
            self.backend.mark_ready(bucket)
            if state.early_flags:
                used = state.flags[list(state.buffers.layout.slices[bucket].params)]
                state.early_flags[bucket].zero_()[: len(used)].copy_(used)
                self.backend.mark_ready(state.flags_bucket + 1 + bucket)

    # -- the end of a backward -------------------------------------------------------------------------------

    def end_of_backward(self) -> None:
        """End the round's filling, unless this backward runs inside another one."""
        self._callback_queued = False
        with self.state.lock:
            if self.state.phase is not Phase.FILLING:
                return
            if inside_a_backward():
                # The outer backward continues. If no further gradient comes, reading one seals the round.
                self.arrivals.guard(only_grad=True)
                return
            if self.arrivals.watch is not None:
                self.arrivals.watch.mark("backward_end")
            self.seal()

    def seal(self) -> None:
        """End the round's filling. Gradients that were set outside of a backward count like any other."""
        state = self.state
        with state.lock:
            if state.phase is not Phase.FILLING:
                self._begin_round()
            for i, view in state.views.items():
                if not state.round.filled[i]:
                    self.filling.fill_missing(i, raw_grad(self.params[i]))
                if i in state.corrections and i not in state.corrections.early:
                    state.corrections.follow(i, view)
            unsent = [bucket for bucket, sent in enumerate(state.round.sent) if not sent]
            state.round.missing = [1] * len(state.round.sent)
            self._send(unsent)
            places, rank = state.places, self.backend.ranks.rank
            state.flag[places.samples] = self.samples
            state.flag[places.unweighted] = int(not self.samples and state.flag[: places.votes].any())
            state.flag[places.votes] = self.vote
            state.flag[places.steps + rank] = JOINED if self.joined else int(state.stepped)
            state.flag[places.waits + rank] = self.waited
            state.stepped, self.samples = False, 0
            self.backend.mark_ready(state.flags_bucket)
            state.phase = Phase.SENT
            self.hold = False
            state.rounds += 1
            state.pending = len(state.views)
            self.arrivals.guard(only_grad=True)
            unguarded = [i for i in state.views if not can_pend(self.params[i])]
            if unguarded:
                self.arrivals.complete(unguarded)

    # -- the optimizer's side --------------------------------------------------------------------------------

    def require_sent(self) -> None:
        """Start a round if there is none: without a backward, the gradients in ``p.grad`` are reduced."""
        with self.state.lock:
            if self.state.phase is not Phase.SENT:
                self.seal()

    def clear_grads(self, set_to_none: bool) -> None:
        """``zero_grad``: pending gradients are cleared on arrival, a round without a step is discarded."""
        state = self.state
        with state.lock:
            if state.phase is not Phase.IDLE:
                if state.phase is Phase.FILLING:
                    self.seal()
                self.gathering.discard()
            state.passes, self.samples = [0] * len(self.params), 0
            state.clear = dict.fromkeys(range(len(self.params)), set_to_none)
            state.apply_clear(i for i, exposed in enumerate(state.round.exposed) if exposed)
            self.gathering.cleared()

    def inherit(self, before: Reducer) -> None:
        """Continue from a finished reducer of other parameters."""
        self.state.backward_passes, self.paused = before.state.backward_passes, before.paused
        self.samples = before.samples
        place = {id(param): i for i, param in enumerate(self.params)}
        for j, kept in before.state.kept.items():
            i = place.get(id(before.params[j]))
            if i is not None:
                self.state.kept[i] = kept
                set_raw_grad(self.params[i], kept.shown)

    def drain(self) -> None:
        """Apply pending updates and let the backend finish the last round, before the end."""
        with self.state.lock:
            if self.state.phase is Phase.IDLE:
                self.arrivals.complete_all()
            elif self.state.phase is Phase.SENT:
                self.gathering.finish_round()

    def close(self) -> None:
        """Make the parameters ordinary again; pending results are lost."""
        for param in self.params:
            clear_pending(param)
            release_class(param)
        self.gathering.close()
