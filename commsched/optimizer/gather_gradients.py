"""``gather="gradients"``: every rank gets whole gradients and updates every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commsched.collectives.model_state import broadcast_parameters
from commsched.collectives.objects import broadcast_object
from commsched.optimizer.absent_ranks import AbsentRanks
from commsched.optimizer.arrivals import Arrivals
from commsched.optimizer.deferred_updates import DeferredUpdate, is_separable
from commsched.optimizer.gathering import Gathering
from commsched.optimizer.pending import set_raw_grad
from commsched.optimizer.step_state import SPARSE, Kept, Update


class GradientGathering(Gathering):
    """Reduced gradients become ``p.grad``; updates wait for them, if need be until the next forward."""

    arrivals: Arrivals

    def show(self, i: int) -> None:
        found = self._reduced(i)
        if found is self.state.views[i]:
            self.state.show(i)
        else:
            set_raw_grad(self.state.params[i], found)

    def _reduced(self, i: int) -> torch.Tensor:
        state, view = self.state, self.state.views[i]
        only_sparse = state.round.used[i] % SPARSE == 0  # no rank's gradient was dense
        sparse, factor = state.round.sparse.get(i), state.round.factor
        if factor != 1.0:
            view.mul_(factor)
            sparse = None if sparse is None else sparse * factor
        if state.sparse_as_dense and only_sparse:
            sparse = view.to_sparse(state.sparse_dims.get(i, 1))
        if sparse is not None and only_sparse:
            # A quantised slot has the sum of residuals.
            changed = state.round.repeated or i in state.shown or i in state.residuals.params
            if not state.sparse_as_dense and not changed:
                state.zeros.add(i)
            if state.sums:
                state.kept[i] = Kept.of(sparse)
            return sparse
        if sparse is not None:
            view.add_(sparse)  # other ranks' gradients were dense: they are in the bucket
        if not state.sums:
            return view
        # Later gradients add to a copy, and the sum stays in the slot: only the difference is summed again.
        copy = view.clone()
        state.kept[i] = Kept.of(copy)
        return copy

    def reduce_outside(self, late: bool, sparse: Sequence[int]) -> None:
        state = self.state
        AbsentRanks(state, self.backend.ranks).tell("reduce outside")
        if late:
            self._reduce_again()
        for i in sparse:
            state.round.sparse[i] = self.backend.ranks.reduce_sparse(
                state.round.sparse.get(i), state.views[i], state.names[i], mean=not state.sums
            )

    def _reduce_again(self) -> None:
        """Run a second round for gradients that came after their bucket was sent, in the same backward."""
        state, backend, late = self.state, self.backend, self.state.round.late
        self.finish_round()
        self.state.round.repeated = True
        # Rank 0 alone contributes the sums, scaled so that reducing them again leaves them as they are.
        carried = 1.0 / (state.scaling.before * state.scaling.after) if backend.ranks.rank == 0 else 0.0
        with torch.no_grad():
            for i, view in state.views.items():
                view.mul_(carried)
                if i in late:
                    view.add_(late[i].to_dense() if late[i].is_sparse else late[i])
                if i in state.corrections:
                    state.corrections.clear(i)
        state.flags.zero_()
        backend.begin_step()
        for bucket in range(state.flags_bucket + 1):
            backend.mark_ready(bucket)
        backend.wait_gathered(state.flags_bucket)

    def gather_gradients(self) -> None:
        self.arrivals.complete_all()

    def step(self, optimizer: Any, synchronous: bool) -> None:
        base, arrivals, state = optimizer._base, self.arrivals, self.state
        whole = synchronous or not is_separable(base) or arrivals.all_arrived() or optimizer._updates_frozen()
        if whole:
            arrivals.complete_all()
        arrivals.mark("step")
        if whole:
            optimizer._update()
            self.finish_step()
        else:
            self.defer(DeferredUpdate(optimizer, base, state.params))

    def defer(self, update: Update) -> None:
        """Take over the update of every parameter: apply it now if its gradient has arrived, else then."""
        state, arrivals = self.state, self.arrivals
        with state.lock:
            state.deferred, state.clear = update, {}
            self.finish_step()
            here = [i for i, exposed in enumerate(state.round.exposed) if exposed]
            if here:
                update(here)
            arrivals.guard()
            hurry = {b for i in arrivals.aliased() for b in state.slots[i].buckets}
            due = sorted(hurry | set(arrivals.arrived()))
            if due:  # else not even the flags are waited for
                arrivals.complete_buckets(due)

    def follow(self) -> bool:
        """Do without the update: the others may clip, or schedule the learning rate (see ``share``)."""
        self.arrivals.complete_all()
        self.finish_step()
        return True

    def share(self, optimizer: Any, root: int) -> None:
        state, ranks = self.state, self.backend.ranks
        process_set, mine = ranks.process_set, ranks.global_rank(ranks.rank) == root
        named = [(f"commsched.join.{i}", p) for i, p in enumerate(state.params)]
        broadcast_parameters(named, root, process_set=process_set)
        # The wrapped class's own methods: each rank keeps its residuals.
        whole = optimizer._base.state_dict(optimizer) if mine else None
        whole = broadcast_object(whole, root, "commsched.join", process_set)
        if not mine:
            optimizer._base.load_state_dict(optimizer, whole)

    def finish_round(self) -> None:
        for bucket in range(self.state.flags_bucket):
            self.backend.wait_gathered(bucket)

    def discard(self) -> None:
        self.arrivals.complete_all()
        self.finish_step(stepped=False)

    def finish_all(self) -> None:
        self.arrivals.complete_all()
        self.state.residuals.keep()
