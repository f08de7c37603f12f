"""commsched's own policy: buckets, the sizes of parts and the order are searched together.

1. **Compare.** Every other policy makes its plan; the result is never worse than the best of these.
2. **Start.** The relaxation in ``bounds`` gives the buckets that would be best if collectives could be
   preempted: a small one for the first layers, which the forward waits for, and larger and larger ones after
   it. The search tries them for several exposed times and several largest parts, beside plain fusion and the
   other policies' buckets.
3. **Order.** For given buckets the order is a one-machine problem with heads and tails, solved by branch and
   bound (``kernels.best_order``); all-gathers go into the gaps of the backward wherever that helps.
4. **Improve.** From the best starts, cuts between buckets are dropped, added and moved
   (``kernels.improve_cuts``).
5. **Parts of gradients.** Where layers hold parts of one gradient, whole gradients are planned, too, unless a
   bound rules them out.
6. **Keep reserves.** Many plans hide all communication of a fast link; they differ once the link is slower
   than measured. The search is then repeated for slower links. Of the plans with the shortest period it takes
   the one that loses least on those links; among plans that lose hardly more, the one with fewest buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scheduler.bounds import relaxed_cuts, startup_bound
from scheduler.ir.buckets import ALIGNMENT, Bucket, Piece
from scheduler.ir.link import TwoTierLink
from scheduler.ir.program import Program
from scheduler.policies.problem import Problem
from scheduler.policies.published import bytescheduler, dear, mgwfbp, pipedap, sequential, wfbp

if TYPE_CHECKING:
    from scheduler.policies.kernels import Line

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
    problem: Problem, seed: int = 0, budget: int = BUDGET, max_buckets: int = 512, keep_parts: bool = False
) -> Program:
    """The best plan found; deterministic for a seed and a budget (of jobs placed, not of seconds).

    If the problem has buckets, only the order is searched. If it gains nothing to send parts of a
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


# -- the search for buckets: starting points and inputs of the compiled loops --------------------------------

ENOUGH = 1 + 1e-6
"""A period this close to a bound is not worth more search."""

SLACK = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Starting points: the relaxation's buckets for its exposed time plus these fractions of the compute."""

PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Each starting point is also tried with its buckets split, into about this many parts in total."""

CLASSES = (8, 32, 128)
"""For each of these limits (and without one) the search climbs from the best start within that many buckets.
"""

NODES = 12
"""Schrage schedules computed per set of buckets during the search (`FINAL_NODES` for the final set)."""
FINAL_NODES = 3000
EXCHANGES = 20_000
FEW = 5
"""Up to this many buckets, every order is tried."""


def ordered(problem: Problem, buckets: Sequence[Bucket]) -> np.ndarray:
    """The best order of these buckets, in the step model's codes."""
    enough = bound_of(problem)
    from scheduler.policies.kernels import best_order

    step, load = problem.model(buckets).kernel_input()
    order, _, _ = best_order(step, load, FINAL_NODES, enough)
    if load.update.any():
        from scheduler.policies.kernels import every_order, exchange

        return (every_order(step, load) if len(buckets) <= FEW else exchange(step, load, order, EXCHANGES))[0]
    return order


def bound_of(problem: Problem, slower: float = 1.0) -> float:
    """A period that no plan beats on a link so much slower."""
    return startup_bound(problem.profile, problem.link.slower(slower), **problem.step)


class BucketSearch:
    """All gradient bytes of a problem on a ``kernels.Line``, and the search for the best cuts of it."""

    def __init__(self, problem: Problem, most: int) -> None:
        self.problem = problem
        sizes = problem.profile.sizes
        self.ready = problem.model(()).ready
        layers = [layer for layer in reversed(range(len(sizes))) if sizes[layer]]
        layers.sort(key=lambda layer: problem.groups[layer])  # stable: in backward order in each group
        self.layers = np.array(layers, np.int64)
        self.groups = np.array([problem.groups[layer] for layer in layers], np.int64)
        self.size = np.array([sizes[layer] for layer in layers], np.int64)
        self.end = np.cumsum(self.size)
        self.begin = self.end - self.size
        self.fence = np.append(0, self.end[np.append(self.groups[1:] != self.groups[:-1], True)])
        self.least = max(ALIGNMENT, problem.profile.total_bytes // (8 * most))
        self.most = most + len(self.fence)

    def run(self, known: Iterable[Sequence[Bucket]], seed: int, budget: int) -> tuple[Bucket, ...]:
        """The best buckets found. ``known`` are additional starting points."""
        from scheduler.policies.kernels import improve_cuts, score_cuts

        (step, _), line = self.problem.model(()).kernel_input(), self._line()
        enough, target = self._goals()

        def rank(cuts: np.ndarray) -> tuple[float, int]:
            return max(score_cuts(step, line, cuts, NODES, enough)[0], target), len(cuts)

        candidates = [*self._starts(line), *map(self._cuts_of, known)]
        distinct = {cuts.tobytes(): cuts for cuts in candidates if len(cuts) <= self.most + 1}
        ranked = sorted(distinct.values(), key=rank)
        starts = {
            cuts.tobytes(): cuts
            for most in (*CLASSES, self.most)
            for cuts in [cuts for cuts in ranked if len(cuts) <= most + 1][:1]
        }
        climbed = [
            improve_cuts(step, line, cuts, NODES, enough, target, seed, budget // len(starts))[0]
            for cuts in starts.values()
        ]
        return self._buckets(min(climbed, key=rank))

    def _goals(self) -> tuple[float, float]:
        """A period and a score (see ``score_cuts``) that cannot be beaten."""
        from scheduler.policies.kernels import CARE, DOUBT

        period, slower, faster = (bound_of(self.problem, factor) for factor in (1, 1 + DOUBT, 1 - DOUBT))
        return ENOUGH * period, ENOUGH * (period + CARE * (slower + faster)) / (1 + 2 * CARE)

    def _line(self) -> Line:
        from scheduler.policies.kernels import Line

        problem = self.problem
        needed = np.array(problem.profile.needed)[self.layers]
        inside, link = problem.link.parts
        return Line(
            self.end,
            needed,
            self.ready[self.layers],
            self.fence,
            link.alpha,
            link.beta,
            link.ramp if isinstance(link, TwoTierLink) else 0.0,
            link.segment if isinstance(link, TwoTierLink) else 0.0,
            0.0 if inside is None else inside.alpha,
            0.0 if inside is None else inside.beta,
            problem.profile.update_per_byte / (problem.ranks if problem.gather == "parameters" else 1),
            self.least,
            ALIGNMENT,
            self.most,
            bool((needed == self.layers).all()),
        )

    def _starts(self, line: Line) -> Iterable[np.ndarray]:
        """The cuts of the relaxation, and equal ones, each with parts of several sizes."""
        profile, link = self.problem.profile, self.problem.link
        exposed, _ = relaxed_cuts(profile, link)
        total = float(profile.total_bytes)
        ends = [relaxed_cuts(profile, link, exposed + slack * profile.compute)[1] for slack in SLACK]
        for bucket_ends in [*ends, [total]]:
            for parts in PARTS:
                yield self._cuts(line, _split(bucket_ends, total / parts))

    def _cuts(self, line: Line, ends: Sequence[float]) -> np.ndarray:
        """Cuts of the line for buckets that end at ``ends`` (bytes counted from layer 0), the same in each
        group.
        """
        from scheduler.policies.kernels import snap_all

        sizes, groups = np.array(self.problem.profile.sizes), np.array(self.problem.groups)
        upto = np.append(0, np.cumsum(sizes))
        inside = [
            border - np.interp(ends, upto, np.append(0, np.cumsum(np.where(groups == group, sizes, 0))))
            for group, border in zip(np.unique(self.groups), self.fence[1:], strict=True)
        ]
        return np.unique(np.append(self.fence, snap_all(line, np.concatenate(inside))))

    def _cuts_of(self, buckets: Sequence[Bucket]) -> np.ndarray:
        at = {int(layer): int(begin) for layer, begin in zip(self.layers, self.begin, strict=True)}
        ends = {at[bucket.pieces[-1].layer] + bucket.pieces[-1].stop for bucket in buckets}
        return np.array(sorted(ends | set(self.fence.tolist())), np.int64)

    def _buckets(self, cuts: np.ndarray) -> tuple[Bucket, ...]:
        buckets = []
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            first, last = np.searchsorted(self.end, [low, high - 1], side="right")
            pieces = []
            for at in range(first, last + 1):
                start, stop = max(low - self.begin[at], 0), min(high - self.begin[at], self.size[at])
                pieces.append(Piece(int(self.layers[at]), int(start), int(stop)))
            buckets.append(Bucket(tuple(pieces), int(self.groups[first])))
        complete = self.problem.model(buckets).complete
        return tuple(buckets[number] for number in np.argsort(complete, kind="stable"))


def _split(ends: Sequence[float], part: float) -> list[float]:
    """The same ends, and more between them, so that no bucket is much larger than ``part``."""
    split: list[float] = []
    begin = 0.0
    for end in ends:
        count = max(1, round((end - begin) / part))
        split += [begin + (end - begin) * (i + 1) / count for i in range(count)]
        begin = end
    return split
