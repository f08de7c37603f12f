"""The search for places of weight gradients, compiled by numba: simulated annealing on a backward's order.

The link is judged as if it could be interrupted: then sending what is due first is best for any order of the
backward, and the exposed time is the largest lateness. An order holds ``l`` for W of layer l and ``n + l``
for its B. Every B stands after the B of the layer above; a W anywhere after that.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numba import njit


class Backward(NamedTuple):
    """By layer: seconds of B, W and F, and seconds of the layer's bytes on the link, RS and AG together.
    ``needed``: the layer whose forward needs these bytes. ``movable``: whether W may stand apart from B.
    ``kept``: bytes that a layer's W needs, its input and the gradient of its output. No order may hold more
    than ``room`` bytes at once.
    """

    inputs: np.ndarray
    weights: np.ndarray
    forward: np.ndarray
    wire: np.ndarray
    needed: np.ndarray
    movable: np.ndarray
    kept: np.ndarray
    room: float


@njit(cache=True)
def _completed(work: Backward, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return when gradients to send are complete, of which layers they are, when the backward ends, and the
    most bytes it holds.
    """
    count = len(work.inputs)
    now, held, most = 0.0, 0.0, 0.0
    for layer in range(count):
        held += work.kept[layer, 0]
    release, layers, jobs = np.empty(count), np.empty(count, np.int64), 0
    half = np.zeros(count, np.bool_)  # one of the two parts of a layer's backward has run
    for code in order:
        layer = code % count
        apart = work.movable[layer]
        if code >= count:
            now += work.inputs[layer]
        else:
            now += work.weights[layer]
        if apart and not half[layer]:
            half[layer] = True
            if code >= count:
                held += work.kept[layer, 1]
                most = max(most, held)
        else:
            held -= work.kept[layer, 0]
            if apart and code < count:
                held -= work.kept[layer, 1]
        if (code < count) == apart and work.wire[layer] > 0.0:
            release[jobs], layers[jobs] = now, layer
            jobs += 1
    return release[:jobs], layers[:jobs], now, most


@njit(cache=True)
def exposed_seconds(work: Backward, order: np.ndarray) -> float:
    """The exposed time of an order of the backward; infinite where it holds too much."""
    release, layers, now, most = _completed(work, order)
    if most > work.room:
        return np.inf
    count, jobs = len(work.inputs), len(release)
    due = np.empty(count)
    due[0] = now
    for layer in range(1, count):
        due[layer] = due[layer - 1] + work.forward[layer - 1]
    waiting = [(0, 0.0) for _ in range(0)]
    link, late, number = 0.0, 0.0, 0
    while number < jobs or len(waiting) > 0:
        if len(waiting) == 0:
            link = max(link, release[number])
        while number < jobs and release[number] <= link:
            heapq.heappush(waiting, (work.needed[layers[number]], work.wire[layers[number]]))
            number += 1
        layer, left = heapq.heappop(waiting)
        end = link + left
        if number < jobs and release[number] < end:
            heapq.heappush(waiting, (layer, end - release[number]))
            link = release[number]
        else:
            link = end
            late = max(late, end - due[layer])
    return late


@njit(cache=True)
def fed(work: Backward, threshold: float, low: bool) -> np.ndarray:
    """The order that computes a weight gradient whenever the link has less than ``threshold`` seconds of work
    left; of those that may run, that of the lowest (``low``) or the highest layer.
    """
    count = len(work.inputs)
    order, place = np.empty(2 * count, np.int64), 0
    backlog = 0.0
    next_ = count - 1
    waiting = [0 for _ in range(0)]
    while next_ >= 0 or len(waiting) > 0:
        if next_ < 0 or (len(waiting) > 0 and backlog < threshold):
            at = 0
            for other in range(len(waiting)):
                if (waiting[other] < waiting[at]) == (low or next_ < 0) and other != at:
                    at = other
            layer = waiting.pop(at)
            order[place], seconds, sent = layer, work.weights[layer], work.wire[layer]
        else:
            layer, next_ = next_, next_ - 1
            order[place], seconds, sent = count + layer, work.inputs[layer], 0.0
            if work.movable[layer]:
                waiting.append(layer)
            else:
                sent = work.wire[layer]
        backlog = max(0.0, backlog - seconds) + sent
        place += 1
    return order[:place]


@njit(cache=True)
def anneal(
    work: Backward, order: np.ndarray, enough: float, tries: int, seed: int, heat: float
) -> tuple[np.ndarray, float]:
    """Moves one weight gradient at a time. A move that is worse by ``heat`` seconds is taken now and then at
    first, and ever more rarely.
    """
    np.random.seed(seed)
    count, size = len(work.inputs), len(order)
    now = exposed_seconds(work, order)
    current, trial, best, least = order.copy(), order.copy(), order.copy(), now
    for number in range(tries):
        if least <= enough:
            break
        source = np.random.randint(size)
        layer = current[source]
        if layer >= count:
            continue
        first = 0
        if layer < count - 1:
            for at in range(size):
                if current[at] == count + layer + 1:
                    first = at + 1
        if np.random.random() < 0.5:
            target = source + np.random.randint(-6, 7)
        else:
            target = first + np.random.randint(size - first)
        if target < first or target >= size or target == source:
            continue
        trial[:] = current
        step = 1 if target > source else -1
        for at in range(source, target, step):
            trial[at] = trial[at + step]
        trial[target] = layer
        other = exposed_seconds(work, trial)
        warmth = heat * (1.0 - number / tries) + 1e-300
        if other <= now or np.random.random() < np.exp((now - other) / warmth):
            current[:], now = trial, other
            if now < least:
                best[:], least = current, now
    return best, least
