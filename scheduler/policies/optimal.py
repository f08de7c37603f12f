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
5. **Weight gradients.** With ``split_backward`` the search is repeated for backwards whose weight gradients
   have places of their own (``search.weight_search``); one is taken where it gains something.
6. **Parts of gradients.** Where layers hold parts of one gradient, whole gradients are planned, too, unless a
   bound rules them out.
7. **Keep reserves.** Many plans hide all communication of a fast link; they differ once the link is slower
   than measured. The search is then repeated for slower links. Of the plans with the shortest period it takes
   the one that loses least on those links; among plans that lose hardly more, the one with fewest buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from scheduler.bounds.split import split_exposed
from scheduler.ir.buckets import Bucket
from scheduler.ir.program import Program
from scheduler.policies.bytescheduler import bytescheduler
from scheduler.policies.dear import dear
from scheduler.policies.mgwfbp import mgwfbp
from scheduler.policies.pipedap import pipedap
from scheduler.policies.problem import Problem
from scheduler.policies.search.bucket_search import BucketSearch, bound_of, ordered
from scheduler.policies.search.weight_search import backward_orders
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


QUICK = 20
"""One of so many parts of the budget judges each order of the backward; the best one gets a whole budget."""

WORTH = 0.995
"""A backward with weight gradients in places of their own is taken if its period is at most this part."""


def optimal(
    problem: Problem,
    seed: int = 0,
    budget: int = BUDGET,
    max_buckets: int = 512,
    split_backward: bool = False,
    extra_memory: float | None = None,
    keep_parts: bool = False,
) -> Program:
    """The best plan found; deterministic for a seed and a budget (of jobs placed, not of seconds).

    Where the problem has buckets only the order is searched. ``split_backward``: weight gradients may have
    places of their own, and hold ``extra_memory`` bytes beyond the backward's peak (None: any number).
    Where it gains nothing to send parts of a gradient early, the plan is for ``profile.whole()``, unless
    ``keep_parts``.
    """
    best = partial(
        _best, split=split_backward, memory=extra_memory, seed=seed, budget=budget, most=max_buckets
    )
    plan, whole = best(problem), replace(problem, profile=problem.profile.whole())
    if keep_parts or whole.profile == problem.profile:
        return plan
    worth = problem.period(plan) / WORTH
    if worth <= (_least(whole) if split_backward else bound_of(whole)):
        return plan
    other = best(whole)
    return plan if worth <= whole.period(other) else other


def _best(problem: Problem, split: bool, memory: float | None, seed: int, budget: int, most: int) -> Program:
    plain = _unsplit(problem, seed, budget, most)
    unsplit = problem.period(plain)
    if not split or _least(problem) > unsplit * WORTH:
        return plain
    orders = backward_orders(problem.profile, problem.link, memory, seed)
    tasks = [replace(problem, backward=backward) for backward in orders]
    known = [plain.buckets]
    quick = [_searched(task, known, seed, budget // QUICK, most) for task in tasks]
    if not quick:
        return plain
    promising = min(range(len(tasks)), key=lambda number: problem.period(quick[number]))
    longer = _searched(tasks[promising], [*known, quick[promising].buckets], seed, budget, most)
    best = min(quick[promising], longer, key=problem.period)
    return best.with_meta(unsplit=unsplit) if problem.period(best) <= unsplit * WORTH else plain


def _least(problem: Problem) -> float:
    """No backward with weight gradients anywhere makes a step shorter than this."""
    return problem.profile.compute + split_exposed(problem.profile, problem.link)


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


def _unsplit(problem: Problem, seed: int, budget: int, max_buckets: int) -> Program:
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
