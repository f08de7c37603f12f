"""The search for buckets, compiled by numba: cuts of the line of all gradient bytes, moved one at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from scheduler.policies.search.order_kernel import best_order
from scheduler.simulate.step_kernel import Load, Step, step_period

IDLE = 8
"""Once the period is good enough, the search for fewer buckets ends when this many moves a bucket fail."""

DOUBT, CARE = 0.1, 0.1
"""Scores include links slower and faster by the factor DOUBT, each with weight CARE."""


class Line(NamedTuple):
    """The layers with bytes in backward order, group after group; a bucket is what stands between two cuts.

    ``fence`` are the cuts that no move may take away: both ends, and the borders between groups. A layer is
    cut at multiples of ``alignment`` only, and into parts of at least ``least`` bytes. ``most`` is the
    largest number of buckets. ``ready``: when the backward has made each layer's gradient; the last layer in
    a bucket completes it. ``layer``: whose forward needs each.
    """

    end: np.ndarray
    layer: np.ndarray
    ready: np.ndarray
    fence: np.ndarray
    alpha: float
    beta: float
    update_per_byte: float
    least: int
    alignment: int
    most: int
    own_forwards: bool
    """Whether each layer is needed by its own forward, and by no earlier one."""


@njit(cache=True)
def load_of(line: Line, cuts: np.ndarray) -> Load:
    """The buckets between these cuts."""
    count = len(cuts) - 1
    layer, ready = np.empty(count, np.int64), np.empty(count)
    cost, update = np.empty(count), np.empty(count)
    for bucket in range(count):
        size = cuts[bucket + 1] - cuts[bucket]
        last = segment_at(line, cuts[bucket + 1] - 1)
        layer[bucket], ready[bucket] = line.layer[last], line.ready[last]
        if not line.own_forwards:
            for segment in range(segment_at(line, cuts[bucket]), last):
                layer[bucket] = min(layer[bucket], line.layer[segment])
        cost[bucket] = line.alpha + line.beta * size
        update[bucket] = line.update_per_byte * size
    return Load(ready, layer, cost, update)


@njit(cache=True)
def segment_at(line: Line, position: int) -> int:
    """The number of the layer, in the order of the line, that holds the byte at ``position``."""
    low, high = 0, len(line.end)
    while low < high:
        middle = (low + high) // 2
        if line.end[middle] <= position:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def score_cuts(step: Step, line: Line, cuts: np.ndarray, nodes: int, enough: float) -> tuple[float, int]:
    """The score of the buckets between ``cuts`` in their best order, and the jobs placed to find it.

    The score is the period, averaged with a little of what it becomes if the link turns out slower or
    faster: of plans that are equally good as planned, those with reserves are better.
    """
    load = load_of(line, cuts)
    order, score, used = best_order(step, load, nodes, enough)
    cost = load.cost.copy()
    for factor in (1.0 - DOUBT, 1.0 + DOUBT):
        for bucket in range(len(cost)):
            load.cost[bucket] = factor * cost[bucket]
        score += CARE * step_period(step, load, order)
    return score / (1.0 + 2.0 * CARE), used * 2 * len(cuts)


@njit(cache=True)
def snap(line: Line, position: int) -> int:
    """The nearest place for a cut: the border of a layer, or inside it where both parts are large enough."""
    segment = segment_at(line, position)
    if segment >= len(line.end):
        return line.end[-1]
    begin = line.end[segment - 1] if segment > 0 else 0
    end = line.end[segment]
    inside = begin + (position - begin) // line.alignment * line.alignment
    if inside - begin >= line.least and end - inside >= line.least:
        return inside
    return begin if position - begin < end - position else end


@njit(cache=True)
def snap_all(line: Line, positions: np.ndarray) -> np.ndarray:
    """A cut near each of ``positions``."""
    cuts = np.empty(len(positions), np.int64)
    for number, position in enumerate(positions):
        cuts[number] = snap(line, int(position))
    return cuts


@njit(cache=True)
def improve_cuts(
    step: Step, line: Line, cuts: np.ndarray, nodes: int, enough: float, target: float, seed: int, budget: int
) -> tuple[np.ndarray, float]:
    """Hill climbing from ``cuts``: drop, add or move one cut; keep the change unless the score gets worse.

    A period of ``enough`` and a score of ``target`` are as good as any below; then fewer buckets are better.
    ``budget`` counts jobs placed, not seconds, so that the same call gives the same cuts on every machine.
    """
    np.random.seed(seed)
    best = cuts.copy()
    score, used = score_cuts(step, line, best, nodes, enough)
    budget -= used
    idle = 0
    while budget > 0 and (score > target or idle < IDLE * len(best)):
        trial = _moved(line, best)
        idle += 1
        budget -= len(best)
        if len(trial) == 0:
            continue
        other, used = score_cuts(step, line, trial, nodes, enough)
        budget -= used
        better = max(other, target) < max(score, target)
        if better or (max(other, target) <= max(score, target) and len(trial) <= len(best)):
            if better or len(trial) < len(best):
                idle = 0
            best, score = trial, other
    return best, score


@njit(cache=True)
def _moved(line: Line, cuts: np.ndarray) -> np.ndarray:
    """The cuts after one random move; empty if the move drawn is not possible."""
    none = cuts[:0]
    kind = np.random.randint(4)
    if kind == 0:
        return _added(line, cuts) if len(cuts) <= line.most else none
    if len(cuts) < 3:
        return none
    at = 1 + np.random.randint(len(cuts) - 2)
    for fixed in line.fence:
        if cuts[at] == fixed:
            return none
    if kind == 1:
        return _spliced(cuts, at, at + 1, -1)
    low, high = cuts[at - 1], cuts[at + 1]
    middle = cuts[at] if kind == 2 else (low + high) // 2
    reach = 0.1 if kind == 2 else 1.0
    place = snap(line, middle + int((np.random.random() - 0.5) * reach * (high - low)))
    if place <= low or place >= high or place == cuts[at]:
        return none
    trial = cuts.copy()
    trial[at] = place
    return trial


@njit(cache=True)
def _added(line: Line, cuts: np.ndarray) -> np.ndarray:
    at = np.random.randint(len(cuts) - 1)
    low, high = cuts[at], cuts[at + 1]
    place = snap(line, low + int(np.random.random() * (high - low)))
    if place <= low or place >= high:
        return cuts[:0]
    return _spliced(cuts, at + 1, at + 1, place)


@njit(cache=True)
def _spliced(cuts: np.ndarray, begin: int, end: int, place: int) -> np.ndarray:
    """The cuts before ``begin`` and from ``end`` on, with ``place`` between them unless it is negative."""
    spliced = np.empty(len(cuts) - (end - begin) + (place >= 0), np.int64)
    spliced[begin] = place
    for at in range(begin):
        spliced[at] = cuts[at]
    for at in range(end, len(cuts)):
        spliced[len(spliced) - len(cuts) + at] = cuts[at]
    return spliced
