"""commsched's own policy: buckets, the sizes of parts and the order are searched together.

1. **Compare.** Every other policy makes its plan; the result is never worse than the best of these.
2. **Start.** The relaxation in ``bounds`` gives the buckets that would be best if collectives could be
   preempted: a small one for the first layers, which the forward waits for, and larger and larger ones behind
   it. The search tries them for several exposed times and several largest parts, beside plain fusion and the
   other policies' buckets.
3. **Order.** For given buckets the order is a one-machine problem with heads and tails, solved by branch and
   bound (``search.order_kernel``); all-gathers go into the gaps of the backward wherever that helps.
4. **Improve.** From the best starts, cuts between buckets are dropped, added and moved
   (``search.cut_kernel``).
5. **Parts of gradients.** Where layers hold parts of one gradient, whole gradients are planned, too, unless a
   bound rules them out.
6. **Keep reserves.** Many plans hide all communication of a fast link; they differ once the link is slower
   than measured. The search is then repeated for slower links. Of the plans with the shortest period it takes
   the one that loses least on those links; among plans that lose hardly more, the one with fewest buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.ir.buckets import Bucket
from scheduler.ir.program import Program
from scheduler.policies.bytescheduler import bytescheduler
from scheduler.policies.dear import dear
from scheduler.policies.mgwfbp import mgwfbp
from scheduler.policies.pipedap import pipedap
from scheduler.policies.problem import Problem
from scheduler.policies.search.bucket_search import BucketSearch, bound_of, ordered
from scheduler.policies.sequential import sequential
from scheduler.policies.wfbp import wfbp

DECOUPLED = (dear, pipedap, sequential)
OTHERS = (*DECOUPLED, wfbp, mgwfbp, bytescheduler)

BUDGET = 4_000_000
"""Jobs placed by the search of one plan; about half a second."""

SAME = 1 + 1e-9
"""Periods closer than this are equal up to rounding."""

SLOWER = (1.25, 1.5)
"""Links so much slower than the given one tell which of several equally fast plans is taken."""

NEARLY = 1.002
"""Plans that lose hardly more there keep reserves too; each bucket costs a little that is not modelled."""

WORTH = 0.995
"""Parts of gradients are sent early if the period is at most this part of that with whole gradients."""


def optimal(
    problem: Problem,
    seed: int = 0,
    budget: int = BUDGET,
    max_buckets: int = 512,
    keep_parts: bool = False,
) -> Program:
    """The best plan found; deterministic for a seed and a budget (of jobs placed, not of seconds).

    Where the problem has buckets only the order is searched. Where it gains nothing to send parts of a
    gradient early, the plan is for ``profile.whole()``, unless ``keep_parts``.
    """
    plan = _best(problem, seed, budget, max_buckets)
    whole = replace(problem, profile=problem.profile.whole())
    if keep_parts or whole.profile == problem.profile:
        return plan
    worth = problem.period(plan) / WORTH
    if worth <= bound_of(whole):
        return plan
    other = _best(whole, seed, budget, max_buckets)
    return plan if worth <= whole.period(other) else other


def _searched(
    problem: Problem, known: Sequence[Sequence[Bucket]], seed: int, budget: int, most: int
) -> Program:
    """The best buckets found and their best order. ``known``: buckets to start from."""
    if problem.has_buckets:
        (chosen,) = problem.candidates()
    elif problem.profile.total_bytes:
        chosen = BucketSearch(problem, most).run(known, seed, budget)
    else:
        chosen = ()
    order = problem.model(chosen).decode(ordered(problem, chosen) if chosen else ())
    return problem.program("optimal", chosen, order, found_by="search")


def _best(problem: Problem, seed: int, budget: int, max_buckets: int) -> Program:
    profile = problem.profile
    made = [policy(problem) for policy in (DECOUPLED if problem.gather == "parameters" else OTHERS)]
    others = [problem.program("optimal", it.buckets, it.link, found_by=it.policy) for it in made]
    known = [other.buckets for other in others]
    slower = [replace(problem, link=problem.link.slower(factor)) for factor in SLOWER]
    plans = [_searched(problem, known, seed, budget, max_buckets)]
    if 2 * float(problem.model(plans[0].buckets).cost.sum()) < profile.compute:
        plans += [_searched(task, known, seed, budget // len(slower), max_buckets) for task in slower]
    plans += others
    shortest = min(map(problem.period, plans))
    equal = [plan for plan in plans if problem.period(plan) <= shortest * SAME]
    losses = [sum(task.period(plan) for task in slower) for plan in equal]
    safe = [plan for plan, loss in zip(equal, losses, strict=True) if loss <= min(losses) * NEARLY]
    return min(safe, key=lambda plan: len(plan.buckets))
