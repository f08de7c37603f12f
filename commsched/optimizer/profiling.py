"""Makes a profile from the times of a few iterations."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from commsched.optimizer.layer_timing import Moments


class Sample(NamedTuple):
    """Forward and backward seconds by parameter, and the seconds outside of both."""

    forward: list[float]
    backward: list[float]
    outside: float

    @property
    def compute(self) -> float:
        """Seconds of the whole iteration."""
        return sum(self.forward) + sum(self.backward) + self.outside


def iteration_times(
    seen: Moments, owners: Sequence[tuple[object, tuple[int, ...]]], order: Sequence[int]
) -> Sample | None:
    """Return the times of one iteration; None where ``seen`` holds no complete one.

    A module's forward lasts until the next module's; its time is its last parameter's, since all must be
    there, or that of the module before, if its own were used earlier (tied weights). A gradient's backward
    lasts from the gradient before it in backward order. Between the last forward
    hook and the first gradient lie the last module's forward, the loss and the first backward: a third counts
    as forward. Where gradients accumulate over several backward passes, the passes between the first forward
    and the last backward count as the last module's forward: nothing waits for them, everything may hide
    under them. Waits for messages must have been taken out.
    """
    if not seen.grads or not {"begin", "backward_end", "enter", "step", "end"} <= set(seen.marks):
        return None
    first_grad = seen.grads[0][1]
    starts: dict[int, float] = {}
    for module, moment in seen.forwards:
        if moment < first_grad:
            starts.setdefault(module, moment)
    if not starts:
        return None
    forward, backward = [0.0] * len(order), [0.0] * len(order)
    sequence = sorted(starts.items(), key=lambda item: item[1])
    ready, last_pass = _last_pass(seen)
    middle = last_pass - first_grad
    turn = sequence[-1][1] + (first_grad - sequence[-1][1]) / 3
    place = {i: position for position, i in enumerate(order)}
    reached = 0
    for (module, start), (_, end) in zip(sequence, [*sequence[1:], (-1, turn + middle)], strict=True):
        reached = max(reached, *(place[i] for i in owners[module][1]))
        forward[order[reached]] += end - start
    moment = turn + middle
    for i in reversed(order):
        end = max(moment, ready.get(i, moment))
        backward[i] = end - moment
        moment = end
    marks = seen.marks
    before = sequence[0][1] - marks["begin"]
    after = max(0.0, marks["enter"] - moment) + marks["end"] - marks["step"]
    return Sample(forward, backward, max(0.0, before + after))


def _last_pass(seen: Moments) -> tuple[dict[int, float], float]:
    """Return when each gradient of the last backward pass arrived, and when the first of them did."""
    ready: dict[int, float] = {}
    first = seen.grads[0][1]
    for i, moment in seen.grads:
        if i in ready and i == seen.grads[0][0]:  # the first parameter again: another pass begins
            ready, first = {}, moment
        ready[i] = moment
    return ready, first


def combine(samples: Sequence[Sample]) -> Sample:
    """Return the median of several iterations, for each entry."""
    forward = [median(values) for values in zip(*(s.forward for s in samples), strict=True)]
    backward = [median(values) for values in zip(*(s.backward for s in samples), strict=True)]
    return Sample(forward, backward, median(s.outside for s in samples))


def spread(samples: Sequence[Sample]) -> float:
    """Return the difference between the longest and the shortest iteration, as a share of the median."""
    times = [sample.compute for sample in samples]
    return (max(times) - min(times)) / (median(times) or 1.0)


def across_ranks(rows: Sequence[Sample], order: Sequence[int]) -> Sample:
    """Return the times of the rank that is slowest at each layer: for it the others wait.

    The ranks begin an iteration together. A layer ends when the last rank has come through it, and lasts from
    the end of the layer before it. ``order`` is that of the forward.
    """
    forward, backward = [0.0] * len(order), [0.0] * len(order)
    reached, last = [0.0] * len(rows), 0.0
    for times, by_rank, layers in (
        (forward, [row.forward for row in rows], order),
        (backward, [row.backward for row in rows], order[::-1]),
    ):
        for i in layers:
            reached = [moment + row[i] for moment, row in zip(reached, by_rank, strict=True)]
            times[i], last = max(reached) - last, max(reached)
    end = max(moment + row.outside for moment, row in zip(reached, rows, strict=True))
    return Sample(forward, backward, end - last)
