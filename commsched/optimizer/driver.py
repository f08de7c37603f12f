"""The parts of one wrapped optimizer: reducer, hooks and plans; decides when to measure and plan again.

The first iterations communicate after the backward and are timed. Then rank 0 plans, and every rank checks
and installs the plan between two iterations. Compute is slower beside traffic (it shares processors and
memory with it), so the first iterations of that plan are timed too, without their waits, and a second plan is
made from those times. In the flags of every round the ranks vote whether the step has become so much slower
or faster that a new plan is due, so that no rank decides alone. Soon after the second plan one rank's vote is
enough: if its compute is much shorter than it was while it was measured, the measurement was disturbed.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commsched.backends.choice import backend_for
from commsched.backends.interface import Scaling
from commsched.collectives.handles import register_joiner
from commsched.collectives.initialization import local_rank
from commsched.env import settings
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.closing import close, close_at_exit
from commsched.optimizer.gather_gradients import GradientGathering
from commsched.optimizer.gather_parameters import ParameterGathering
from commsched.optimizer.gathering import Gathering
from commsched.optimizer.hooks import Hooks, owners
from commsched.optimizer.joining import Joining
from commsched.optimizer.measuring import (
    Sample,
    StepTimes,
    across_ranks,
    combine,
    disturbed,
    iteration_times,
    spread,
)
from commsched.optimizer.model_layers import Model
from commsched.optimizer.options import Options
from commsched.optimizer.planner import Plan, Planner
from commsched.optimizer.reducer import Reducer
from commsched.optimizer.reports import StepReports, Timeline
from commsched.optimizer.residuals import residuals_of
from commsched.optimizer.step_state import StepState
from commsched.optimizer.tied_weights import TiedWeights
from commsched.optimizer.whole_matrix import owners_of
from scheduler.ir.profile import Profile

WARM_UP = 1
SAMPLES = 3
REPEATS = 2  # how often disturbed measurements are made again
ALONE = 0.3  # compute so much slower alone than beside traffic was disturbed; less is left to the second plan
SAME = 0.02  # compute beside traffic counts as equally fast up to this relative difference


@dataclass
class Measuring:
    """Timed iterations: ``alone``, with the communication behind the compute, or as the plan orders it."""

    alone: bool
    seen: int = 0
    samples: list[Sample] = field(default_factory=list)


class Driver:
    """Everything behind a ``DistributedOptimizer`` on more than one rank."""

    def __init__(self, optimizer: Any) -> None:
        """Drive a wrapped optimizer (``wrapper.DistributedMethods``): its trained parameters, its options."""
        options: Options = optimizer._options
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        names = [optimizer._parameter_names[p] for p in params]
        self.backend = backend_for(params, options.transport, options.process_set)
        ranks = self.backend.ranks
        sharded = options.gather == "parameters"
        self._owners = owners_of(optimizer._base, params, self.backend) if sharded else None
        model, modules = Model.of(params, names, options.wire_dtype), owners(params, optimizer._model)
        self.planner = Planner(model, self.backend, options, self._owners)
        self.planner.send_by_rows(params, modules)
        after = options.predivide / (1 if options.sums else ranks.size)
        scaling = Scaling(1.0 / options.predivide, after, options.wire_dtype)
        residuals = residuals_of(optimizer, params, model, ranks, after, not sharded)
        state = StepState(params, names, scaling, options.sums, residuals, options.sparse_as_dense)
        self.gathering: Gathering = (
            ParameterGathering(state, self.backend, optimizer, options.master_weights)
            if sharded
            else GradientGathering(state, self.backend)
        )
        self.reducer = Reducer(state, self.backend, self.gathering)
        self.arrivals = self.reducer.arrivals
        self.order = list(self.planner.model.layers)
        self.times = StepTimes(self.arrivals, self.backend)
        self.install(self.planner.first(self.order))
        tied = TiedWeights(self.reducer, self.planner.heads, self.planner.model.head_of)
        self.hooks = Hooks(self.reducer, modules, options.bucket_bytes, tied)
        self.profile: Profile | None = None
        self._measuring: Measuring | None = None
        self._compute: float | None = None  # this rank's, as it was measured beside the traffic
        self._repeats = REPEATS
        file = settings().timeline
        self._timeline = Timeline(file, ranks.rank, ranks.size) if file else None
        wanted = settings().log_every or settings().metrics_port
        self._reports = StepReports(settings(), ranks, local_rank(), self.times) if wanted else None
        self._finalizer = weakref.finalize(
            self, close, os.getpid(), self.backend, self.hooks, self.reducer, self._timeline, self._reports
        )
        self._optimizer = weakref.proxy(optimizer)
        register_joiner(self)
        close_at_exit(self)
        if self.planner.adapts:
            self._start_measuring()
        elif self._timeline is not None:
            self._watch_next()

    # -- plans -----------------------------------------------------------------------------------------------

    def install(self, plan: Plan) -> None:
        self.plan = plan
        model = self.planner.model
        layout = model.layout(plan.buckets(model), self.backend.ranks.size, self._owners)
        kinds = {group: (model.kind(group), self.backend.device) for group in layout.lengths}
        self.reducer.install(plan.program, Buffers(layout, kinds, self.backend.room))
        self.times.restart()

    @property
    def synchronous(self) -> bool:
        """Whether the step must end with everything in place."""
        return (self._measuring is not None and self._measuring.alone) or self.hooks.compiled

    # -- one iteration ---------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Time the step that is about to return, and plan again where that is due."""
        self.arrivals.mark("end")
        self.times.step()
        self.reducer.waited = self.times.last_wait()
        if self._reports is not None:
            self._reports.step(self.plan)
        self._record()
        if self._measuring is not None:
            self._take_sample(self._measuring)
        elif self.planner.adapts:
            # Ranks that never wait do not notice another forward order, so a rank that does votes for all.
            # Another program may have had one rank's processor.
            reordered = self.hooks.order_changed and self.times.may_replan_at_once()
            every = self.backend.ranks.size if reordered or self._was_disturbed() else 0
            self.reducer.vote = every or int(self.times.has_drifted())
            if 2 * self.reducer.votes > self.backend.ranks.size:
                self.times.patience *= 2
                self._repeats -= 1
                self._start_measuring()

    def _was_disturbed(self) -> bool:
        return self._repeats > 0 and self._compute is not None and self.times.contradicts(self._compute)

    def _watch_next(self) -> None:
        self.arrivals.watch = self.backend.watch()
        self.arrivals.watch.mark("begin")

    def _record(self) -> None:
        if self._timeline is None or self.arrivals.watch is None:
            return
        self._timeline.add_phases(self.arrivals.watch, self.reducer.state.rounds)
        if self._measuring is None or not self._measuring.alone:  # else the planner must see them first
            self._record_operations(self.backend.events())
        if self._measuring is None:
            self._watch_next()

    def _record_operations(self, events: Any) -> None:
        if self._timeline is not None:
            names = [f"bucket {piece.number}" for piece in self.reducer.state.buffers.layout.slices]
            self._timeline.add_operations(events, names)

    # -- measuring -------------------------------------------------------------------------------------------

    def _start_measuring(self) -> None:
        self._measuring, self._compute = Measuring(alone=True), None
        self.reducer.vote = 0
        self.arrivals.settle()
        self.hooks.forget_order()
        self.reducer.hold = True
        self._watch_next()

    def _take_sample(self, now: Measuring) -> None:
        now.seen += 1
        watch = self.arrivals.watch
        if now.seen > WARM_UP and watch is not None:
            sample = iteration_times(watch.compute(), self.hooks.owners, self.order)
            if sample is not None:
                now.samples.append(sample)
        elif now.alone:
            order = self.hooks.forward_order(len(self.order))
            orders = self.backend.ranks.all_values(order if self.hooks.order else None)  # None: has joined
            self.order = next((seen for seen in orders if seen), order)
        if now.seen < WARM_UP + SAMPLES:
            self.reducer.hold = now.alone
            self._watch_next()
            return
        self._measuring = self.arrivals.watch = None
        if now.alone:
            self._plan_from_samples(now.samples)
        else:
            self._plan_again(now.samples)
        if self._measuring is not None or self._timeline is not None:
            self._watch_next()

    def _plan_from_samples(self, samples: Sequence[Sample]) -> None:
        events = self.backend.events()
        self._record_operations(events)
        state = self.reducer.state
        early, joined = state.corrections.early, self.reducer.joined
        self.planner.learn(events, self.plan, state.buffers.layout, joined, self.order, early)
        model = self.planner.model
        rows, source = self._samples_of_all(samples, "measured in this run")
        if not rows:
            warnings.warn(
                "commsched could not time the forward of this model (no module's forward was seen before the"
                " backward); it plans from sizes alone",
                stacklevel=2,
            )
            profile = model.guess(self.order, self.planner.link)
        else:
            profile = self._profile(rows, source)
        self.profile = profile
        self.install(self.planner.better(profile, self.order))
        if rows and self.backend.watch().sees_waits:
            self._measuring = Measuring(alone=False)

    def _profile(self, rows: Sequence[Sample], source: str) -> Profile:
        return self.planner.model.profile(self.order, across_ranks(rows, self.order), source)

    def _samples_of_all(self, samples: Sequence[Sample], how: str) -> tuple[list[Sample], str]:
        """Return the times of each rank that has not joined, and what they are."""
        mine = (combine(samples), spread(samples)) if samples else None
        found = [row for row in self.backend.ranks.all_values(mine) if row is not None]
        widest = max((width for _, width in found), default=0.0)
        return [row for row, _ in found], f"{how}, {SAMPLES} iterations whose compute varied by {widest:.0%}"

    def _plan_again(self, samples: Sequence[Sample]) -> None:
        """Plan again from the times beside traffic, if they differ from those without."""
        self.arrivals.settle()
        rows, source = self._samples_of_all(samples, "measured in this run, beside the traffic")
        if not rows or self.profile is None:
            return
        profile = self._profile(rows, source)
        alone, self.profile = self.profile.compute, profile
        self._compute = combine(samples).compute if samples else None
        if self._repeats and disturbed(alone, profile.compute, ALONE):
            self._repeats -= 1
            self._start_measuring()
        elif abs(profile.compute / alone - 1) > SAME:
            self.install(self.planner.better(profile, self.order))
        else:
            self.plan = replace(self.plan, profile=profile)
            self.times.restart()

    def start_join(self) -> Joining | None:
        """Return this rank's part in the steps of the others, after ``join()``; None if this is closed."""
        return Joining(self.reducer, self.after_step, self._optimizer) if self._finalizer.alive else None

    def close(self, wait: bool = True) -> None:
        if wait:
            self._finalizer()
        elif (call := self._finalizer.detach()) is not None:
            function: Any = call[1]
            function(*call[2], wait=False)
