"""The split bound: what no order can beat where weight gradients (W) may be computed apart from input
gradients (B), at any time in the same backward. Start-up costs are not counted.

Two relaxations bound the exposed time, and the larger one counts.

**Two machines.** For any layer m, what layers ``0..m`` send has to pass the link before ``F(m)``, each
layer's bytes after its W. Computing B and W is a first machine, sending a second one, and W of layer l waits
for ``B(l+1)``: a two-machine flow shop whose precedences are a tree. Johnson's rule on composite jobs gives
its shortest makespan (Sidney 1979), and preemption does not shorten it. In

    exposed >= makespan(0..m) - backward - forward(0..m-1)

all other layers' W stand behind, which is never too late for them.

**A fluid.** The first relaxation lets each m choose an order of its own. A linear programme has one for all:
``P(l, k)`` is the part of W of layer l that has been computed when B of layer k ends, at the time ``T(k)``.
Of layer l at least ``wire(l) * (1 - P(l, k))`` must be sent after ``T(k)``, so for all k and m

    sum over l <= m of wire(l) * (1 - P(l, k))  <=  backward + forward(0..m-1) + exposed - T(k)
    T(k) = sum of B from layer k up + sum over l of W(l) * P(l, k)

which is linear; the least ``exposed`` is a bound. Leaving out some k and m keeps it one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.bounds.window import compute_seconds
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile

MOST = 48
"""So many ends of B, and so many layers m, have constraints in the linear programme."""


class Parts(NamedTuple):
    """By layer: seconds of B, W (0 where it stays with B) and F, and of RS and AG together."""

    inputs: np.ndarray
    weights: np.ndarray
    forward: np.ndarray
    wire: np.ndarray

    @classmethod
    def of(cls, profile: Profile, link: Link) -> Parts:
        layers = profile.layers
        weights = np.array([layer.weight_backward if layer.bytes else 0.0 for layer in layers])
        backward = np.array([layer.backward for layer in layers])
        forward = np.array([layer.forward for layer in layers])
        return cls(backward - weights, weights, forward, 2 * link.beta * np.array(profile.sizes, float))


def split_bound(profile: Profile, link: Link, *, gather: str = "gradients", ranks: int = 2) -> float:
    """Seconds per iteration that no order with weight gradients anywhere beats; needs SciPy."""
    exposed = max(split_exposed(profile, link), fluid_exposed(profile, link))
    return max(compute_seconds(profile, gather), profile.compute + exposed)


def split_exposed(profile: Profile, link: Link) -> float:
    """Exposed seconds by the flow shop alone."""
    parts = Parts.of(profile, link)
    backward = float(parts.inputs.sum() + parts.weights.sum())
    above = np.cumsum(parts.inputs[::-1])[::-1] - parts.inputs
    below = np.cumsum(parts.forward) - parts.forward
    exposed = 0.0
    for layer, makespan in enumerate(_makespans(parts)):
        exposed = max(exposed, float(above[layer]) + makespan - backward - float(below[layer]))
    return exposed


def _makespans(parts: Parts) -> list[float]:
    """For each layer m the shortest makespan of W of layers 0 to m and what they send, from the end of
    ``B(m+1)`` on.
    """
    jobs: list[tuple[float, float]] = []  # what may follow B of the layer, composed, in Johnson's order
    overlap, found = 0.0, []
    for layer in range(len(parts.inputs)):
        apart, wire = float(parts.weights[layer]), float(parts.wire[layer])
        # A layer whose W stays with its B sends after B.
        head = (float(parts.inputs[layer]), 0.0 if apart else wire)
        while jobs and _key(jobs[0]) < _key(head):
            after = jobs.pop(0)
            both = min(head[1], after[0])
            overlap += both
            head = head[0] + after[0] - both, head[1] + after[1] - both
        jobs.insert(0, head)
        if apart:
            jobs.append((apart, wire))
            jobs.sort(key=_key)
        compute = link = 0.0
        for seconds, sent in jobs:
            compute += seconds
            link = max(link, compute) + sent
        found.append(link + overlap)
    return found


def _key(job: tuple[float, float]) -> tuple[int, float]:
    """Johnson's order: jobs that send longer than they compute come first, short computations first; then the
    others, long messages first.
    """
    return (0, job[0]) if job[0] < job[1] else (1, -job[1])


def fluid_exposed(profile: Profile, link: Link) -> float:
    """Exposed seconds by the linear programme."""
    return _least_exposed(*_fluid_constraints(Parts.of(profile, link)))


def _fluid_constraints(parts: Parts) -> tuple[list[tuple[int, int, float]], list[float], int]:
    """Return the constraints' (row, variable, factor), the rows' upper limits, and the number of parts of W.

    The first variables are parts of W, the last one is the exposed time.
    """
    count = len(parts.inputs)
    ends, layers = _spread(parts.inputs, count), _spread(parts.wire, count)
    apart = [layer for layer in range(count) if parts.weights[layer]]
    # A variable for each part that a chosen end of B leaves open, and the exposed time.
    pairs = ((layer, end) for layer in apart for end in ends if end <= layer)
    number = {pair: place for place, pair in enumerate(pairs)}
    exposed = len(number)
    rows: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def at_most(terms: list[tuple[int, float]], limit: float) -> None:
        rows.extend((len(limits), column, value) for column, value in terms)
        limits.append(limit)

    for layer in apart:
        mine = [end for end in sorted(ends, reverse=True) if (layer, end) in number]
        for before, after in zip(mine, mine[1:]):
            at_most([(number[layer, before], 1.0), (number[layer, after], -1.0)], 0.0)
    backward, below = parts.inputs.sum() + parts.weights.sum(), np.cumsum(parts.forward) - parts.forward
    for end in ends:
        computed = parts.inputs[end:].sum()
        # Layers whose W stays with B have sent nothing before B ends.
        open_ = parts.wire.copy()
        open_[[layer for layer in range(end, count) if not parts.weights[layer]]] = 0.0
        live = [layer for layer in apart if (layer, end) in number]
        for last in layers:
            terms = [
                (number[layer, end], parts.weights[layer] - (parts.wire[layer] if layer <= last else 0.0))
                for layer in live
            ]
            limit = backward + below[last] - computed - open_[: last + 1].sum()
            at_most([*terms, (exposed, -1.0)], float(limit))
    return rows, limits, exposed


def _least_exposed(rows: list[tuple[int, int, float]], limits: list[float], count: int) -> float:
    """Return the least last variable; the ``count`` ones before it lie between 0 and 1."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError:
        raise ValueError("this bound is solved by SciPy, which is not installed: pip install scipy") from None
    row, column, value = zip(*rows)
    matrix = coo_matrix((value, (row, column)), shape=(len(limits), count + 1))
    goal = np.zeros(count + 1)
    goal[count] = 1.0
    bounds = [(0.0, 1.0)] * count + [(0.0, None)]
    solved = linprog(goal, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    if not solved.success:
        raise ValueError(f"the split bound's linear programme was not solved: {solved.message}")
    return float(solved.fun)


def _spread(weights: np.ndarray, count: int) -> list[int]:
    """Up to ``MOST`` of the numbers 0 to ``count - 1``, at equal distances of accumulated weight."""
    if count <= MOST:
        return list(range(count))
    upto = np.cumsum(weights) / max(float(weights.sum()), 1e-300)
    chosen = np.searchsorted(upto, np.linspace(0.0, 1.0, MOST))
    return sorted({0, count - 1, *np.minimum(chosen, count - 1).tolist()})
