"""All that one ``DistributedOptimizer`` owns on more than one rank: round, hooks and plans; when it measures.

``docs/optimizer.md`` ("Planning") tells which iterations are timed and when plans are made. In the flags of
every round the ranks vote: rank 0 when its plan has been found, so that all install it between the same two
iterations, and each rank when the step has become so much slower or faster that a new plan is due.

[Note: disturbed measurements]
Steps that communicate after their compute are slow. A series of them is timed for the first plan, after a
drift, and for another order of the forward; never because another program had a processor meanwhile. Times
beside the traffic then replace those, and cost nothing: always under the first plan unless its search failed,
and again if a rank's compute after a plan is much shorter than it was while it was timed. One rank's vote is
enough, and tells whether it is for a slow series: when the ranks know the votes, two steps later, its reason
may have passed. The link stays as it was fitted; if that was wrong, DDP's way may be faster: see
[Note: trials].

Once a searched plan is in use, ``Trial`` times it beside DDP's way: see [Note: trials].

Parameters that are frozen stay in the plan for some steps: most are unfrozen soon. Those that are unfrozen or
converted are in a new plan from the end of the step on, over the same connections; until then their gradients
are reduced apart from the buckets. Parameters that are added get a new plan at once, on all ranks.

[Note: where new plans are made]
A new plan is collective, so a rank may make one only where every rank comes: in ``add_param_group()``, at the
end of a step, and at the beginning of ``step()`` or ``synchronize()`` if user code has exchanged parameters
in the groups (``refresh``). Not in a forward, nor in the step of another optimizer: a rank may have no data,
and meet the others elsewhere first. What decides on it must be known to every rank: what the script does with
the parameters, and not which gradients have come.

[Note: trials]
Ranks that take turns of a trial count steps since a plan was installed, which is at the same step on all of
them; so they need no votes, and end each turn together. They exchange the medians of its steps, and the
slowest rank's counts. Plans that reduce other buckets give the same bits, or the same up to rounding where a
searched plan does too. So transports do not change: tiers add by host, and flat ones would give other bits.
While a rank has joined, steps are no measure: the searched plan is used, and the trial put off.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from commsched.backends import backend_for
from commsched.backends.interface import Backend, Scaling
from commsched.backends.ranks import Ranks, ranks_text
from commsched.collectives.compression import block_code
from commsched.collectives.job import local_rank
from commsched.collectives.joins import register_joiner
from commsched.collectives.private_groups import hosts_of
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.agreement import Agreement
from commsched.optimizer.buckets import Buffers, shares_by_host
from commsched.optimizer.gradient import Residuals
from commsched.optimizer.hooks import Hooks, TiedWeights, owners
from commsched.optimizer.measuring import (
    NOTICED,
    Sample,
    StepTimes,
    across_ranks,
    combine,
    iteration_times,
    spread,
)
from commsched.optimizer.planner import Model, Observed, Options, Plan, Planner, Trial, owners_of
from commsched.optimizer.reports import StepReports, Timeline, few
from commsched.optimizer.round import Round, State
from commsched.optimizer.sharded_step import ShardedStep
from commsched.optimizer.whole_step import StepMode, WholeStep, is_separable
from commsched.process import failure_monitor
from scheduler.ir.profile import Profile

WARM_UP = 1
SAMPLES = 3
REPEATS = 2  # how often disturbed measurements are made again
SAME = 0.02  # compute beside traffic counts as equally fast up to this relative difference
TRY_AFTER = 2 * NOTICED  # timed steps of a searched plan, the first turn of its trial
TURN = 3  # timed steps of each later turn
STAY = 10  # steps that a frozen parameter stays in the plan; doubled whenever one comes back
ALONE = 1 << 32  # is added to a vote for a slow series, and is more than the votes of all ranks
_LOOK = 0.002  # seconds between two looks at what else has happened while the other ranks are awaited
_GRACE = 5.0  # seconds that the store has to name those that have not come


@dataclass
class Measuring:
    """Timed iterations: ``alone``, with the communication after the compute, or as the plan orders it."""

    alone: bool
    seen: int = 0
    samples: list[Sample] = field(default_factory=list)


@dataclass
class _Parts:
    """What must be closed when the session ends. It does not hold the session."""

    process: int
    backend: Backend
    round: Round | None = None
    planner: Planner | None = None
    hooks: Hooks | None = None
    timeline: Timeline | None = None
    reports: StepReports | None = None

    def close(self, wait: bool = True) -> None:
        """Give everything back at once. Never raises: the parameters must be readable afterwards."""
        if os.getpid() != self.process:
            return  # a forked child: the backend, and the timeline's file, are its parent's
        # Other ranks may still need this one's part of the last step, and the model this rank's last update.
        # A script that ends with an exception must not wait: the others find out when the connections close.
        orderly = wait and not (_exiting and hasattr(sys, "last_type"))
        steps = []
        if self.reports is not None:
            steps.append(self.reports.close)
        if self.hooks is not None:
            steps.append(self.hooks.remove)
        if self.planner is not None:
            steps.append(self.planner.close)
        if orderly and self.round is not None:
            steps.append(self.round.leave)
        steps.append(lambda: self.backend.close(orderly))
        if self.round is not None:
            steps.append(self.round.close)
        if self.timeline is not None:
            steps.append(self.timeline.close)
        for step in steps:
            with suppress(Exception):  # each of them, whatever became of the others
                step()
        if self.round is not None and self.round.failed is not None:
            warnings.warn(
                f"rank {self.backend.ranks.rank}: the last update raised {self.round.failed!r} when it was"
                " applied, so parameters lack it",
                stacklevel=2,
            )
        self.round = self.planner = self.hooks = self.timeline = self.reports = None


class Session:
    """Everything behind a ``DistributedOptimizer`` on more than one rank."""

    round: Round
    hooks: Hooks
    planner: Planner

    def __init__(self, optimizer: Any) -> None:
        """Serve a wrapped optimizer (``wrapper.DistributedMethods``): its trained parameters, its options."""
        options: Options = optimizer._options
        self._optimizer: Any = weakref.proxy(optimizer)
        self._wrapped = weakref.ref(optimizer)
        params = _trained(optimizer)
        whole = not block_code(options.wire_dtype)
        self.backend = backend_for(params, options.transport, options.process_set, whole)
        self._parts = _Parts(os.getpid(), self.backend)
        self._finalizer = weakref.finalize(self, _Parts.close, self._parts)
        self._frozen: dict[int, int] = {}  # steps that parameters of the plan have been frozen, by their ids
        self._stay, self._left = STAY, set[int]()  # which have left the plan, frozen
        ranks = self.backend.ranks
        self._agreement = Agreement(self._optimizer, ranks)
        self._begin(params, options)
        file = settings().timeline
        self._timeline = Timeline(file, ranks.rank, ranks.size) if file else None
        wanted = settings().log_every or settings().metrics_port
        self._reports = StepReports(settings(), ranks, local_rank(), self.times) if wanted else None
        self._parts.timeline, self._parts.reports = self._timeline, self._reports
        register_joiner(self)
        close_at_exit(self)
        self._start()

    def _begin(self, params: Sequence[nn.Parameter], options: Options) -> None:
        """Make round, hooks and the first plan for these parameters. Collective."""
        optimizer, backend, ranks = self._optimizer, self.backend, self.backend.ranks
        take_over(self._optimizer, self)
        known, planned = optimizer._names(), {id(param) for param in params}
        outside = [p for p in optimizer._every_param() if id(p) not in planned]
        names = [known[p] for p in (*params, *outside)]
        sharded = options.gather == "parameters"
        virtual = bool(options.virtual_divisor)
        self._owners = owners_of(optimizer._base, params, backend, virtual) if sharded else None
        # With gather="parameters", ranks share the updates and the optimizer's state equally.
        by_host = backend.name == "tiers" and not sharded
        backend.shares = shares_by_host(hosts_of(ranks.process_set)) if by_host else ()
        model = Model.of(params, names[: len(params)], options.wire_dtype)
        modules = owners(params, optimizer._model)
        frozen = Model.of(outside, names[len(params) :]).fingerprint
        rule = f"{self._agreement.rule(params)}, frozen: {frozen}"
        before = self._parts.planner
        self.planner = self._parts.planner = Planner(model, backend, options, self._owners, rule, before)
        self.planner.send_by_rows(params, modules)
        self._adapts = self.planner.adapts
        after = options.predivide / (1 if options.sums else ranks.size)
        scaling = Scaling(1.0 / options.predivide, after, options.wire_dtype)
        mode: StepMode = (
            ShardedStep(backend, optimizer, options.master_weights) if sharded else WholeStep(backend)
        )
        quantised = {i: params[i] for i in sorted(model.quantised)}
        group = model.groups[min(quantised)] if quantised else 0
        # A strong reference to the optimizer would be a cycle that delays its end.
        residuals = Residuals(
            quantised, group, ranks, after, not sharded, lambda: optimizer.__dict__["state"]
        )
        self.round = Round(
            params,
            names,
            backend,
            mode,
            scaling,
            residuals,
            outside=outside,
            sums=options.sums,
            sparse_as_dense=options.sparse_as_dense,
        )
        self.round.apart = bool(self.planner.sparse)
        self.round.has_company = partial(_has_company, ranks)
        self._every, self._known = optimizer._every_param(), planned.union(map(id, outside))
        self.round.strangers = partial(_strangers, self._wrapped, self._every, self._known)
        self.round.compare_every, self.round.digest_of = self._agreement.every, self._agreement.digest
        self._next: Plan | None = None  # which the next round takes into use
        self._parts.round = self.round
        self.mode = mode
        self.order = list(self.planner.model.layers)
        self.times = StepTimes(self.round, backend)
        self.install(self.planner.first(self.order))
        tied = TiedWeights(self.round, self.planner.heads, self.planner.model.head_of)
        self.hooks = self._parts.hooks = Hooks(self.round, modules, options.bucket_bytes, tied)
        self._planned = planned
        self._made_for = _kinds(params)
        self.profile: Profile | None = None
        self._measuring: Measuring | None = None
        self.searches = False  # whether a plan for ``profile`` is being searched, beside the training
        self._steps_left = 0  # until the step that takes it; 0: rank 0 votes for one
        self._measure_next = False  # whether the first iterations under that plan are timed
        self._compute: float | None = None  # this rank's, as it was measured beside the traffic
        self._repeats = REPEATS
        self.trial: Trial | None = None  # of the plan that was searched last
        self._try_after = TRY_AFTER

    def _start(self) -> None:
        if self._adapts:
            self._start_measuring()
        elif self._timeline is not None:
            self._watch_next()

    # -- other parameters ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Make a new plan before gradients are used, if user code has exchanged parameters in the groups."""
        if isinstance(self.mode, ShardedStep):
            self.mode.check_fits()
        every = self._optimizer._every_param()
        if not _same(every, self._every) and self._known != set(map(id, every)):
            self.begin_anew()

    def begin_anew(self, add: Callable[[], None] = lambda: None) -> None:
        """Make a new plan at once, after ``add`` has given the optimizer parameters. Collective.

        Gradients may be under way. What some rank has sent is summed first, and stays in ``p.grad``; what is
        local stays so.
        """
        before = self.round
        refusal = None
        try:
            before.check_can_end()
        except ValueError as error:
            refusal = error
        if self.backend.ranks.joined or (before.state is State.IDLE and not self._nobody_joined()):
            raise ValueError(
                f"rank {self.backend.ranks.rank}: add parameters when all ranks have joined:"
                f" {ranks_text(self.backend.ranks.joined)} did, and parameters need a plan of all ranks"
            )
        told = self.backend.ranks.all_values((before.state is not State.IDLE, refusal and str(refusal)))
        sent = any(sent for sent, _ in told)
        refused = {rank: why for rank, (_, why) in enumerate(told) if why and sent}
        if refused:
            raise refusal or ValueError(
                f"rank {self.backend.ranks.rank}: other parameters need another plan, for which"
                f" {few([f'rank {rank} cannot end its round: {why}' for rank, why in refused.items()])}"
            )
        add()
        if sent and before.state is State.IDLE:
            before.seal()
        known = self._known
        self._replace()
        if sent:
            self.round.weigh_new(known, before.factor)

    def _replace(self) -> None:
        """Make a new plan in the place of this one. Collective."""
        optimizer, before = self._optimizer, self.round
        owed = before.due  # a comparison, which comes with the next round
        self.mode.finish_all()
        self.planner.close()
        self.hooks.remove()
        before.close()
        stay = {i for i in self._planned if self._frozen.get(i, 0) < self._stay}
        params = [p for p in optimizer._every_param() if p.requires_grad or id(p) in stay]
        now = {id(param) for param in params}
        self._stay *= 2 if now & self._left else 1
        self._left = ((self._left | self._planned) - now) & set(map(id, optimizer._every_param()))
        optimizer._options = options = optimizer._options.for_other_params(before.params, params)
        self._begin(params, options)
        self.round.inherit(before)
        self.round.number -= owed
        self._start()

    def _is_due(self) -> bool:
        """Return whether the parameters need another plan, at the end of a step."""
        trained, planned = set(map(id, _trained(self._optimizer))), self._planned
        self._frozen = {i: self._frozen.get(i, 0) + 1 for i in planned - trained} if trained else {}
        if not planned.issuperset(trained) or _kinds(self.round.params) != self._made_for:
            return True
        return any(steps >= self._stay for steps in self._frozen.values())

    # -- plans -----------------------------------------------------------------------------------------------

    def install(self, plan: Plan) -> None:
        self.plan = plan
        model = self.planner.model
        layout = model.layout(plan.buckets(model), self.backend.ranks.size, self._owners, self.backend.shares)
        kinds = {group: (model.kind(group), self.backend.device) for group in layout.lengths}
        self.round.install(plan.program, Buffers(layout, kinds, self.backend.zeros))
        self.times.restart()

    def _install_next(self, plan: Plan) -> None:
        """Take a plan into use where the next round begins.

        A new plan needs everything that the last one sent. At the end of a step that is on its way, and the
        step would wait for it; when the next gradient comes, the forward has waited for it where it had to.
        """
        if self.mode.prepares_together or self.round.residuals.params:  # to install it is collective
            self.round.settle()
            self.install(plan)
        else:
            self._next, self.round.take_up = plan, weakref.WeakMethod(self._take_up)

    def _take_up(self) -> None:
        """Install the plan that waits for the next round, if there is one."""
        plan, self._next = self._next, None
        if plan is not None:
            if self._timeline is not None:
                self._record_operations(self.backend.events())  # while their buckets have names
            self.install(plan)

    @property
    def synchronous(self) -> bool:
        """Whether the step must end with everything in place."""
        return (self._measuring is not None and self._measuring.alone) or self.hooks.compiled

    # -- one iteration ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare the ranks in a step whose round is due for it: see ``agreement``. Collective."""
        now = self.round
        now.due = False
        with now.lock:
            now.wait_for_flags()
        if len(set(now.digests)) > 1 and not self.backend.ranks.joined:
            self._agreement.compare(now.number, now.planned, self.plan.program.early_step)

    def after_step(self) -> None:
        """Time the step that is about to return, and plan again where that is due."""
        together = self.end_step()
        if together is not None:
            with self.backend.ranks.together(self._meet()):
                together()

    def _meet(self) -> bool:
        """Wait for the other ranks at the end of this step, and not for the gradients on their way.

        Return whether some have joined.
        """
        now, backend, timeout = self.round, self.backend, settings().timeout
        ranks = backend.ranks
        members = [ranks.global_rank(rank) for rank in range(ranks.size)]
        all_here, begin = ranks.arrive(False, timeout), time.monotonic()
        try:
            while not wait([all_here], _LOOK).done:
                failure = backend.failure() or failure_monitor.lost(members)
                if not failure and time.monotonic() - begin > timeout + _GRACE:
                    failure = f"rank {ranks.rank}: the job's store, in rank 0's process, does not answer"
                if failure:
                    raise CommError(failure)
                # Who has read this round's flags may wait until all have: see [Note: gradients apart].
                if backend.is_gathered(now.flags_bucket):
                    with now.lock:
                        now.wait_for_flags()
        finally:
            all_here.cancel()
        return all_here.result()

    def end_step(self) -> Callable[[], None] | None:
        """Time the step that is about to return; return what all ranks have to do together then, if anything.

        Ranks that have joined may not begin with it before the others: these may still be busy with a step of
        another optimizer, for which they need the ranks that have joined.
        """
        self.round.mark("end")
        self.times.step()
        self.round.waited = self.times.last_wait()
        if self._reports is not None:
            self._reports.step(self.plan)
        if self._timeline is not None:
            self._record(self._timeline)
        if not self.round.joined and self._is_due() and self._nobody_joined():
            self._replace()
        elif self._measuring is not None:
            return self._take_sample(self._measuring)
        elif self.searches:
            self._steps_left -= 1
            if self._steps_left == 0 or (self._steps_left < 0 and self._has_majority()):
                return self._finish_plan
            self.round.vote = self.backend.ranks.size if self.planner.is_ready else 0
        elif self.trial is not None and not self.trial.over:
            return self._end_turn if self.times.has_timed(TURN) else None
        elif self._adapts and self.times.are_settled:  # before, votes for the plan may still arrive
            # Ranks that never wait do not notice another forward order, so a rank that does votes for all.
            # Another program may have had one rank's processor.
            reordered = self.hooks.order_changed and self.times.may_replan_at_once()
            drifted = self.times.has_drifted()
            every = self.backend.ranks.size if reordered or self._was_disturbed() else 0
            self.round.vote = (every or int(drifted)) + ALONE * (reordered or drifted)
            if self._has_majority():
                return self._measure_again
            elif self.trial is None and self.times.has_timed(self._try_after) and not self.why_untried:
                return self._end_turn
        return None

    def _has_majority(self) -> bool:
        return 2 * (self.round.votes % ALONE) > self.backend.ranks.size

    def _nobody_joined(self) -> bool:
        """Return whether all ranks can make a new plan: the flags of the last round say so."""
        with self.round.lock:
            self.round.wait_for_flags()
        return not self.backend.ranks.joined

    def _was_disturbed(self) -> bool:
        return self._repeats > 0 and self._compute is not None and self.times.contradicts(self._compute)

    def _watch_next(self) -> None:
        self.round.watch = self.backend.watch()
        self.round.watch.mark("begin")

    def _record(self, timeline: Timeline) -> None:
        if self.round.watch is None:
            return
        timeline.add_phases(self.round.watch, self.round.number)
        if self._measuring is None or not self._measuring.alone:  # else the planner must see them first
            self._record_operations(self.backend.events())
        if self._measuring is None:
            self._watch_next()

    def _record_operations(self, events: Any) -> None:
        if self._timeline is not None:
            names = [f"bucket {piece.number}" for piece in self.round.buffers.layout.slices]
            self._timeline.add_operations(events, names)

    # -- measuring -------------------------------------------------------------------------------------------

    def _start_measuring(self) -> None:
        self._measuring, self._compute = Measuring(alone=True), None
        self.round.vote = 0
        self.round.settle()
        self._take_up()
        self.hooks.forget_order()
        self.round.send_at_end = True
        self._watch_next()

    def _measure_again(self) -> None:
        """Measure what the ranks have voted for: ``alone`` if one needs that, else beside the traffic."""
        self.times.patience *= 2
        self._repeats -= 1
        if self.round.votes >= ALONE:
            self._start_measuring()
        else:
            self._measure_beside()

    def _measure_beside(self) -> None:
        self._measuring, self.round.vote = Measuring(alone=False), 0
        self._watch_next()

    def _take_sample(self, now: Measuring) -> Callable[[], None] | None:
        """Take the times of a step; return what all ranks do together after the first and the last one."""
        now.seen += 1
        watch = self.round.watch
        if now.seen > WARM_UP and watch is not None:
            sample = iteration_times(watch.compute(), self.hooks.owners, self.order)
            if sample is not None:
                now.samples.append(sample)
        elif now.alone:
            return partial(self._agree_on_order, now)
        if now.seen < WARM_UP + SAMPLES:
            self._keep_measuring(now)
            return None
        return partial(self._end_measuring, now)

    def _agree_on_order(self, now: Measuring) -> None:
        order = self.hooks.forward_order(len(self.order))
        orders = self.backend.ranks.all_values(order if self.hooks.order else None)  # None: has joined
        self.order = next((seen for seen in orders if seen), order)
        self._keep_measuring(now)

    def _keep_measuring(self, now: Measuring) -> None:
        self.round.send_at_end = now.alone
        self._watch_next()

    def _end_measuring(self, now: Measuring) -> None:
        self._measuring = self.round.watch = None
        if now.alone:
            self._plan_from_samples(now.samples)
        else:
            self._plan_again(now.samples)
        if self._measuring is not None or self._timeline is not None:
            self._watch_next()

    def _plan_from_samples(self, samples: Sequence[Sample]) -> None:
        events = self.backend.events()
        self._record_operations(events)
        now = self.round
        facts = self.plan, now.buffers.layout, self.order, now.early_parts()
        observed = None if now.joined else self.planner.observed(events, *facts)
        rows, source, seen = self._times_of_all(samples, "measured in this run", observed)
        self.planner.learn(seen)
        model = self.planner.model
        if not rows:
            # Bare tensors have no forward to time, and an update of all parameters at once hides nothing.
            can_time = bool(self.hooks.owners) and is_separable(self._optimizer._base)
            if can_time and self.backend.ranks.rank == 0:
                warnings.warn(
                    "commsched could not time the forward of this model (no module's forward was seen before"
                    " the backward); it plans from sizes alone",
                    stacklevel=2,
                )
            profile = model.guess(self.order, self.planner.link)
        else:
            profile = self._profile(rows, source)
        self._measure_next = bool(rows) and self.backend.watch().sees_waits
        self._plan_for(profile, meanwhile=True)

    def _plan_for(self, profile: Profile, meanwhile: bool) -> None:
        self.profile, self.trial, self._try_after = profile, None, TRY_AFTER
        plan, steps = self.planner.begin(profile, self.order, meanwhile)
        self.searches, self._steps_left = steps is not None, steps or 0
        if not self.searches:
            self._use(plan)
        elif plan is not None:
            self.install(plan)

    def _finish_plan(self) -> None:
        self.searches, self.round.vote = False, 0
        self._use(self.planner.finish())

    def _use(self, plan: Plan | None) -> None:
        """Take a plan into use; None: its search failed, and the plan in use stays."""
        measure, self._measure_next = self._measure_next, False
        if plan is None:
            self.times.restart()  # votes for the plan may still arrive
            return
        self._install_next(plan)
        if measure:
            self._measure_beside()

    def _profile(self, rows: Sequence[Sample], source: str) -> Profile:
        return self.planner.model.profile(self.order, across_ranks(rows, self.order), source)

    def _times_of_all(
        self, samples: Sequence[Sample], how: str, observed: Observed | None = None
    ) -> tuple[list[Sample], str, list[Observed]]:
        """Return the times of each rank that has any, what they are, and what ranks have observed."""
        mine = (combine(samples), spread(samples)) if samples else None
        timed, seen = zip(*self.backend.ranks.all_values((mine, observed)), strict=True)
        there = [row for row in timed if row is not None]
        widest = max((width for _, width in there), default=0.0)
        source = f"{how}, {SAMPLES} iterations whose compute varied by {widest:.0%}"
        return [row for row, _ in there], source, [each for each in seen if each is not None]

    def _plan_again(self, samples: Sequence[Sample]) -> None:
        """Plan again from the times beside traffic, if they differ from those without."""
        rows, source, _ = self._times_of_all(samples, "measured in this run, beside the traffic")
        if not rows or self.profile is None:
            return
        profile = self._profile(rows, source)
        before, self.profile = self.profile.compute, profile
        self._compute = combine(samples).compute if samples else None
        if abs(profile.compute / before - 1) > SAME:
            self._plan_for(profile, meanwhile=False)
        else:
            self.plan = replace(self.plan, profile=profile)
            self.times.restart()

    # -- the plan beside DDP's way ---------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether no plan is measured for, searched or tried; between steps the same on all ranks."""
        tried = bool(self.why_untried) or (self.trial is not None and self.trial.over)
        return tried and not self.searches and self._measuring is None

    @property
    def why_untried(self) -> str:
        """Why no plan of this optimizer is timed beside DDP's way; "" if each is."""
        if self.planner.schedule != "auto" or not self._adapts:
            return "the schedule or its profile was given"
        if self.mode.prepares_together:
            return "gather='parameters' moves optimizer state with each plan"
        if self.round.residuals.params:
            return "quantised gradients move their residuals with each plan"
        return ""

    def _end_turn(self) -> None:
        """End a turn of the trial, and take the plan into use that is next, or that was the fastest."""
        self.round.vote = 0  # a trial ends before other votes count
        medians = self.backend.ranks.all_values(None if self.round.joined else self.times.median_step())
        trial, self.trial = self.trial, None
        if None in medians:
            plan = trial.plans[0] if trial is not None else self.plan
            self._try_after += TRY_AFTER  # of the steps since this plan was installed
        else:
            self.trial = trial or Trial([self.plan, *self.planner.like_ddp(self.plan)])
            self.trial.end_turn(max(medians))
            plan = self.trial.plans[self.trial.now]
        if plan is not self.plan:
            self._install_next(plan)

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive

    @property
    def wrapped(self) -> Any:
        """The optimizer that ``DistributedOptimizer`` returned; None if nobody holds it any more."""
        return self._wrapped()

    def check_can_join(self) -> None:
        """Raise ``ValueError`` where the user must do something before ``join()``; apply the last update."""
        now = self.round
        if not self.is_open or now.backend.failure() is not None:
            return  # it takes no more steps on any rank
        now.mode.refuse_early("join()")
        with suppress(ValueError):  # of a backward that has raised: such an optimizer ends, see ``begin``
            now.leave_cleared()
        if now.state is State.SENT:
            raise ValueError(
                f"rank {now.ranks.rank}: join() between a backward pass and its step(); call step() first (or"
                " zero_grad() to drop the gradients, or close() if the optimizer is no longer used)"
            )
        with suppress(CommError):  # a rank has closed it
            now.complete_all()
        now.raise_failed()  # before the others know that this rank joins

    def start_join(self) -> Joining | None:
        """Return this rank's part in the steps of the others, after ``join()``; None if it can have none."""
        if not self.is_open:
            return None
        self._frozen = {}  # a rank that has joined counts none of the steps that the others still take
        joining = Joining(self)
        return joining if joining.begin() else None

    def close(self, wait: bool = True) -> None:
        """Apply the last update (not with ``wait=False``), and give back connections, threads and buffers."""
        if self._finalizer.detach() is not None:
            self._parts.close(wait)


def _trained(optimizer: Any) -> list[nn.Parameter]:
    with torch._C.DisableTorchFunctionSubclass():
        return [p for p in optimizer._every_param() if p.requires_grad]


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects in the same order: half the time of sets of ids."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _strangers(of: Callable[[], Any], every: Sequence[Any], known: Container[int]) -> list[nn.Parameter]:
    """Return the parameters of this optimizer's groups, once ``every``, that have no ``known`` id."""
    optimizer = of()
    now = every if optimizer is None else optimizer._every_param()
    return [] if _same(now, every) else [param for param in now if id(param) not in known]


def _shares(optimizer: Any) -> bool:
    return getattr(optimizer._base, "shares_parameters", False)


def _kinds(params: Sequence[nn.Parameter]) -> list[Any]:
    """Return what a plan depends on, for each parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(p.dtype, p.shape) for p in params]


# -- at the process's end ------------------------------------------------------------------------------------


_opened: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_exiting = False


def _open_sessions() -> list[Session]:
    """Return the open sessions, in the order of opening. Threads may open and end others meanwhile."""
    return [one for ref in _opened.valuerefs() if (one := ref()) is not None and one.is_open]


def open_optimizers() -> list[Any]:
    """Return the optimizers whose sessions are open, in the order in which those were made."""
    return [optimizer for one in _open_sessions() if (optimizer := one.wrapped) is not None]


def take_over(optimizer: Any, session: Session | None = None) -> None:
    """Close this rank's other optimizers over any of the parameters of this one, which has this session.

    Each would take the gradients that the other one waits for. Scripts make another optimizer for the next
    phase of a training, and keep the first.
    """
    mine = set(map(id, optimizer._every_param()))
    for one in [] if _shares(optimizer) else open_optimizers():
        if (
            one._session is not session
            and not _shares(one)
            and not mine.isdisjoint(map(id, one._every_param()))
        ):
            one.close()


def _has_company(ranks: Ranks) -> bool:
    """Return whether this rank has another optimizer that is open, beside that of these ranks."""
    others = (one.backend.ranks for one in _open_sessions() if one.backend.ranks is not ranks)
    return any(other.global_own == ranks.global_own for other in others)


def close_at_exit(session: Session) -> None:
    """Close it before the engine's and the collectives' exit handlers run."""
    _opened[next(_numbers)] = session
    _register()


@cache
def _register() -> None:

    def close_all() -> None:
        global _exiting
        _exiting = True
        for session in _open_sessions():
            session.close()

    atexit.register(close_all)


# -- after join() --------------------------------------------------------------------------------------------

# A rank that has called ``join()``: it takes part in the others' steps until all ranks have joined.
#
# There is one ``Joining`` for each optimizer that the rank holds open. Rank J has joined, rank A has not;
# both hold the optimizer. Every line but the second and the last two is what happens in any step.
#
# | when | rank J sends | rank A sends | over |
# |---|---|---|---|
# | J calls ``join()`` | a round of zeros, its flag says JOINED | | the optimizer's connections |
# | at once | "I join" | | the carrier (Horovod: its own join) |
# | A's backward | | a round of gradients | the optimizer's connections |
# | A knows J's flag, steps | | "reduce apart"; if sharded also "clip", "step", "discard" | the job's store |
# | J has read that | the update of its shards, then the next round of zeros | its shards | the connections |
# | a plan is due | "joined", when it has followed that step | "here" | the job's store |
# | both have read that | times, votes, agreements | the same | ``PrivateObjects`` |
# | A calls ``join()`` | | as J did | |
# | the carrier's join ends | the keys of the optimizers it began with | the same | the carrier |
# | all members listed it | | | (J and A see JOINED of all ranks in the flags of the last round) |
# | in the end | | rank A, which joined last: parameters, state, options | the carrier |
#
# With ``gather="gradients"`` J leaves the update to the others, which may clip or schedule the learning rate.
# It gets their parameters and state in the end. With ``gather="parameters"`` they need its shards' update.
#
# **Which optimizers take part is agreed, once all have joined** (``commsched.collectives.joins``): those
# that all ranks of their process set held open when they joined. References decide nothing: one rank's
# collector may have freed an optimizer that another rank still keeps.
# - A rank that closed the optimizer before it joined, or whose step had failed, does not list it. Nobody can
#   step it any more, so J ends its part without waiting for anybody (``give_up``); its next use is an error.
# - Nobody waits for an optimizer that is open but idle: the carrier's join decides when all have joined.


class Joining:
    """The rounds of one optimizer after ``join()``."""

    def __init__(self, session: Session) -> None:
        self._session, self._round = session, session.round
        now, self._ranks = session.round, session.round.ranks
        self.key, self.ranks_of_job = self._ranks.key, list(self._ranks.process_set.ranks or ())
        self.uses_carrier = now.backend.name.endswith("horovod")
        self.failure: CommError | None = None
        self.ended = False
        self._early: Sequence[int] = ()  # ranks that joined in an earlier round than the last one
        self._last = 0
        self.joined_last: set[int] = set()  # ranks of the job
        self._stepped: bool | None = None  # whether what this rank has followed was a step; None: not yet
        self._in_step = False  # the flags of the others' round are known, its end is not
        self._together: Callable[[], None] | None = None  # what all ranks do after the step
        self._all_here: Future[bool] = Future()  # when they have come to do so
        self._steps = 0  # of the others

    def begin(self) -> bool:
        """Begin the first round; return whether this optimizer can take part."""
        now = self._round
        if now.backend.failure() is not None:
            return False
        if now.state is State.RAISED:
            self.give_up(
                f"rank {self._ranks.rank} called join() after a backward pass of this optimizer had failed;"
                " call zero_grad() before join(), or close() if the optimizer is no longer used"
            )
            return False
        now.joined = True
        try:
            self._begin_round()
        except CommError:  # a rank has closed it
            now.joined = False
            return False
        return True

    def _begin_round(self) -> None:
        """Begin a round with gradients of zero."""
        self._round.clear_grads(set_to_none=True)
        self._round.seal()

    def poll(self) -> None:
        """Take part in what the others have begun, without waiting for their next step.

        Sets ``ended`` once the flags say that all ranks have joined, ``failure`` once the connections have
        failed.
        """
        if self.ended or self.failure is not None:
            return
        try:
            self._go_on()
        except CommError as error:
            if self._round.backend.failure() is None:
                raise
            self.stop()
            self.failure = error  # perhaps because a rank has closed it: the agreement in the end tells

    def _go_on(self) -> None:
        now, ranks = self._round, self._ranks
        if self._together is not None:
            if not self._all_here.done():
                return
            together, self._together = self._together, None
            with ranks.together(self._all_here.result()):
                together()
            self._begin_round()
        if not self._in_step:
            if not now.backend.is_gathered(now.flags_bucket):
                return
            self._early = ranks.joined
            # Reading the flags may wait until the others read them, who may be busy with another optimizer.
            if now.reduces_apart() and ranks.next_order() is None:
                return
            now.reduce_apart()
            self._in_step = len(ranks.joined) < ranks.size
        if not self._in_step:
            last = set(ranks.joined) - set(self._early) or set(ranks.joined)
            self._last, self.joined_last = max(last), {ranks.global_rank(rank) for rank in last}
            self.ended = True
            return
        if self._stepped is None:
            self._stepped = now.mode.follow()
        if self._stepped is None or (now.pending and not now.all_arrived()):
            return
        stepped, self._stepped, self._in_step = self._stepped, None, False
        now.settle()
        if stepped:
            self._steps += 1
            self._together = self._session.end_step()
        if self._together is None:
            self._begin_round()
        else:
            self._all_here = ranks.arrive(True)

    def give_up(self, reason: str) -> None:
        """End this rank's part and the optimizer, which can no longer be stepped; its next use says why."""
        self.stop()
        self._round.backend.abort(reason)
        self._round.joined, self._ranks.joined = False, ()
        self._session.close(False)

    def stop(self) -> None:
        """End the thread that asks the store whether all ranks have come, if there is one."""
        self._all_here.cancel()

    def missed(self) -> bool:
        """Return whether this rank lacks steps that the others took after it had joined."""
        return self._steps > 0 and isinstance(self._round.mode, WholeStep)

    def end(self) -> None:
        """End the last round; give ranks that joined early what the last ones have learned. Collective."""
        now = self._round
        self._ranks.joined, now.joined = (), False
        now.mode.discard()
        now.clear_grads(set_to_none=True)
        if self._early:
            now.mode.share(self._session._optimizer, self._ranks.global_rank(self._last))
