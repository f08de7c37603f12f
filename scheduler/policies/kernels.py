"""The searches of ``optimal``, compiled by numba. Imported only by functions that are about to run them."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit

from scheduler.simulate.kernels import Load, Step, step_period

# -- the search for buckets: cuts of the line of all gradient bytes, moved one at a time ---------------------

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
    ramp: float
    segment: float
    inside_alpha: float
    inside_beta: float
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
    cost, update, inside = np.empty(count), np.empty(count), np.empty(count)
    for bucket in range(count):
        size = cuts[bucket + 1] - cuts[bucket]
        last = segment_at(line, cuts[bucket + 1] - 1)
        layer[bucket], ready[bucket] = line.layer[last], line.ready[last]
        if not line.own_forwards:
            for segment in range(segment_at(line, cuts[bucket]), last):
                layer[bucket] = min(layer[bucket], line.layer[segment])
        cost[bucket] = line.alpha + line.beta * size + line.ramp * min(size, line.segment)
        inside[bucket] = line.inside_alpha + line.inside_beta * size
        update[bucket] = line.update_per_byte * size
    return Load(ready, layer, cost, update, inside)


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


# -- the best order of RS and AG for given buckets, compiled by numba: Carlier's branch and bound ------------

# One link is one machine. Job ``b`` is the RS of bucket b, job ``n + b`` its AG. A job has a **head** (it
# cannot start earlier), a cost, and a **tail** (what must follow it before the iteration ends). Minimising
# the latest ``end + tail`` is the problem ``1 | r_j, q_j, prec | Cmax``. Schrage's rule starts, whenever the
# link is free, the ready job with the longest tail. If that is not optimal, one job went ahead of more
# urgent ones that became ready while it ran; in the best order it stands before all of them or after all of
# them, so its tail or its head is raised and the rule is asked again.
#
# Of two links, the busier one is the machine. Time inside the host before an RS between hosts is part of its
# head, and after an AG of its tail; if hosts are the slower part, both collectives between hosts lie between
# the RS and the AG inside, and are their delay. That the other link does one thing at a time is left to
# ``step_period``.


class Jobs(NamedTuple):
    head: np.ndarray
    tail: np.ndarray
    cost: np.ndarray
    delay: np.ndarray
    """Seconds between the RS and the AG of each bucket."""


@njit(cache=True)
def best_order(step: Step, load: Load, nodes: int, enough: float) -> tuple[np.ndarray, float, int]:
    """The best order found in ``nodes`` Schrage schedules, its period, and the schedules used.

    It is optimal if fewer than ``nodes`` were used and updates take no time. A period of ``enough`` ends
    the search.
    """
    jobs = _jobs(step, load)
    size = len(jobs.cost)
    order = np.empty(size, np.int64)
    start, end = np.empty(size), np.empty(size)
    if step.gathers_late:
        # Each RS as it becomes ready, which ends them as early as can be at any speed; then the most urgent
        # AGs.
        for bucket in range(size // 2):
            jobs.tail[bucket] = -jobs.head[bucket]
            jobs.head[size // 2 + bucket] = np.inf
        _schrage(jobs, order, start, end)
        return order, step_period(step, load, order), 1
    heads, tails, bounds = np.empty((nodes + 2, size)), np.empty((nodes + 2, size)), np.zeros(nodes + 2)
    _copy(jobs.head, heads, 0)
    _copy(jobs.tail, tails, 0)
    best, chosen = np.inf, order.copy()
    open_, used = 1, 0
    while open_ > 0 and used < nodes:
        open_ -= 1
        if bounds[open_] >= best:
            continue
        for job in range(size):
            jobs.head[job], jobs.tail[job] = heads[open_, job], tails[open_, job]
        _schrage(jobs, order, start, end)
        used += 1
        period = step_period(step, load, order)
        if period < best:
            best, chosen = period, order.copy()
            if best <= enough:
                break
        last, first = _critical(jobs, order, start, end)
        if first == last:
            continue
        job, due, work, earliest = order[first], jobs.tail[order[last]], 0.0, np.inf
        for position in range(first + 1, last + 1):
            work += jobs.cost[order[position]]
            earliest = min(earliest, jobs.head[order[position]])
        with_job = min(earliest, jobs.head[job]) + jobs.cost[job] + work + jobs.tail[job]
        bound = max(bounds[open_], earliest + work + due, with_job)
        if bound >= best:
            continue
        for _ in range(2):
            _copy(jobs.head, heads, open_)
            _copy(jobs.tail, tails, open_)
            bounds[open_] = bound
            open_ += 1
        # The upper one is looked at first: mostly a job that blocks urgent ones had better wait.
        _raise_tail(jobs, tails[open_ - 2], job, work + due)
        _raise_head(jobs, heads[open_ - 1], job, earliest + work)
    return chosen, best, used


@njit(cache=True)
def _copy(values: np.ndarray, rows: np.ndarray, row: int) -> None:
    # Assigning slices would say the same and take numba much longer to compile.
    for at in range(len(values)):
        rows[row, at] = values[at]


@njit(cache=True)
def _schrage(jobs: Jobs, order: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Fills ``order`` with jobs, ``start`` and ``end`` with times, by position."""
    count = len(jobs.delay)
    coming = [(jobs.head[b], b) for b in range(count)]
    heapq.heapify(coming)
    waiting = [(0.0, 0) for _ in range(0)]
    now = 0.0
    for position in range(2 * count):
        if len(waiting) == 0:
            now = max(now, coming[0][0])
        while len(coming) > 0 and coming[0][0] <= now:
            job = heapq.heappop(coming)[1]
            heapq.heappush(waiting, (-jobs.tail[job], job))
        job = heapq.heappop(waiting)[1]
        order[position] = job
        start[position] = now
        now += jobs.cost[job]
        end[position] = now
        if job < count:
            heapq.heappush(coming, (max(jobs.head[job + count], now + jobs.delay[job]), job + count))


@njit(cache=True)
def _jobs(step: Step, load: Load) -> Jobs:
    count, layers = len(load.layer), len(step.forward)
    own = np.zeros(layers + 1)  # updates that run before the forward of each layer
    delay = np.zeros(count)
    for b in range(count):
        if step.update_in_compute:
            own[load.layer[b]] += load.update[b]
        else:
            delay[b] = load.update[b]
    after = np.zeros(layers + 1)  # compute from the forward of each layer on
    for layer in range(layers - 1, -1, -1):
        after[layer] = step.forward[layer] + own[layer + 1] + after[layer + 1]
    head, tail, costs = np.empty(2 * count), np.empty(2 * count), np.empty(2 * count)
    for b in range(count):
        layer, cost, beside = load.layer[b], load.cost[b], load.inside[b]
        if beside > cost:
            delay[b] += 2.0 * cost
            cost, beside = beside, 0.0
        costs[b] = costs[b + count] = cost
        tail[b + count] = after[layer] + (load.update[b] if step.update_in_compute else 0.0) + beside
        tail[b] = tail[b + count] + cost + delay[b]
        head[b] = load.ready[b] + beside
        head[b + count] = max(head[b] + cost, step.update_from) + delay[b]
    return Jobs(head, tail, costs, delay)


@njit(cache=True)
def _critical(jobs: Jobs, order: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    """The position at which the longest path ends, and that of the last job before it, with no pause between,
    whose tail is shorter.

    Twice the same position if there is no such job: then the order is optimal.
    """
    last, longest = 0, -1.0
    for position in range(len(order)):
        if end[position] + jobs.tail[order[position]] >= longest:
            last, longest = position, end[position] + jobs.tail[order[position]]
    position = last
    while position > 0 and start[position] == end[position - 1]:
        position -= 1
        if jobs.tail[order[position]] < jobs.tail[order[last]]:
            return last, position
    return last, last


@njit(cache=True)
def _raise_tail(jobs: Jobs, tail: np.ndarray, job: int, least: float) -> None:
    """``job`` must come before what takes ``least`` from its end on; so must the RS of an AG."""
    count = len(jobs.delay)
    tail[job] = max(tail[job], least)
    if job >= count:
        tail[job - count] = max(tail[job - count], tail[job] + jobs.cost[job] + jobs.delay[job - count])


@njit(cache=True)
def _raise_head(jobs: Jobs, head: np.ndarray, job: int, least: float) -> None:
    """``job`` cannot start before ``least``; nor can the AG of an RS before that has ended."""
    count = len(jobs.delay)
    head[job] = max(head[job], least)
    if job < count:
        head[job + count] = max(head[job + count], head[job] + jobs.cost[job] + jobs.delay[job])


# -- orders judged by their period alone: for updates, which branch and bound does not model -----------------

# An update between RS and AG delays the AG by a time that depends on the updates before it. ``exchange``
# moves jobs one at a time; ``every_order`` tries all orders of a few buckets.


@njit(cache=True)
def is_order(order: np.ndarray, gathers_late: bool) -> bool:
    """Whether every AG stands after its RS (``gathers_late``: after every RS)."""
    count = len(order) // 2
    reduced = np.zeros(count, np.bool_)
    seen = 0
    for job in order:
        if job < count:
            reduced[job] = True
            seen += 1
        elif not reduced[job - count] or (gathers_late and seen < count):
            return False
    return True


@njit(cache=True)
def exchange(step: Step, load: Load, order: np.ndarray, tries: int) -> tuple[np.ndarray, float]:
    """Moves one job at a time to another place as long as that helps; computes ``tries`` periods at most."""
    best, trial = order.copy(), order.copy()
    period = step_period(step, load, best)
    improved = True
    while improved and tries > 0:
        improved = False
        for source in range(len(best)):
            for target in range(len(best)):
                trial[:] = best
                low, high = min(source, target), max(source, target)
                if source < target:
                    trial[low:high] = best[low + 1 : high + 1]
                else:
                    trial[low + 1 : high + 1] = best[low:high]
                trial[target] = best[source]
                if source == target or tries <= 0 or not is_order(trial, step.gathers_late):
                    continue
                tries -= 1
                other = step_period(step, load, trial)
                if other < period:
                    best[:], period = trial, other
                    improved = True
    return best, period


@njit(cache=True)
def every_order(step: Step, load: Load) -> tuple[np.ndarray, float]:
    """The best of all orders: for n buckets there are ``(2n)! / 2**n``."""
    count = len(load.layer)
    order, best, period = np.zeros(2 * count, np.int64), np.zeros(2 * count, np.int64), np.inf
    placed = np.zeros(2 * count, np.bool_)
    order[0] = -1
    position = 0  # depth-first: the job at `position` is replaced by the next one that may stand there
    while position >= 0:
        job = order[position]
        if job >= 0:
            placed[job] = False
        job += 1
        while job < 2 * count and (placed[job] or not _may_follow(placed, job, step.gathers_late)):
            job += 1
        if job == 2 * count:
            position -= 1
            continue
        order[position] = job
        placed[job] = True
        position += 1
        if position < 2 * count:
            order[position] = -1
            continue
        other = step_period(step, load, order)
        if other < period:
            best[:], period = order, other
        position -= 1
    return best, period


@njit(cache=True)
def _may_follow(placed: np.ndarray, job: int, gathers_late: bool) -> bool:
    count = len(placed) // 2
    if job < count:
        return True
    return bool(placed[:count].all()) if gathers_late else bool(placed[job - count])
