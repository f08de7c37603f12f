"""What is timed while training: layers, for a profile, and whole steps, which tell when the profile is old.

``Watch`` records the moments of one iteration, ``iteration_times`` makes times of layers from them, and
``across_ranks`` those that count for the job. ``StepTimes`` times every step since the last plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

DRIFT = 0.2  # steps so much slower or faster than the first ones after a plan need a new one
SETTLE = 2  # warm-up steps after a new plan, ignored
WINDOW = 15  # steps whose median is compared
KEPT = 4 * WINDOW  # steps over which medians are reported
NOTICED = 4  # steps whose compute tells whether measuring was disturbed
DISTURBED = 0.1  # computes so much faster than was measured
BRIEF = 0.02  # seconds: shorter iterations differ by more than that from one another
PATIENCE = 200  # at least so many steps between two new plans; doubled with every one
_MOST_MICROSECONDS = 2**31 - 2


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a range in torch.profiler's trace; without a running profiler, a context that costs nothing."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


# -- the moments of one iteration ----------------------------------------------------------------------------


@dataclass
class Moments:
    """Seconds on the clock of the backend's event log; forwards by module, gradients by parameter."""

    forwards: list[tuple[int, float]]
    grads: list[tuple[int, float]]
    marks: dict[str, float]
    waits: list[tuple[float, float]]

    def moved(self, to: Callable[[Any], float]) -> Moments:
        """Return the same iteration with every moment moved, without its waits."""
        return Moments(
            [(module, to(moment)) for module, moment in self.forwards],
            [(param, to(moment)) for param, moment in self.grads],
            {name: to(moment) for name, moment in self.marks.items()},
            [],
        )

    def without(self, spans: Sequence[tuple[float, float]]) -> Moments:
        """Return the same iteration on a clock that stops during these spans."""
        return self.moved(lambda now: now - sum(min(end, now) - start for start, end in spans if start < now))


class Watch:
    """Records one iteration. ``now`` marks a moment, ``seconds`` reads a mark once the iteration is over."""

    def __init__(
        self,
        now: Callable[[], Any] = time.monotonic,
        seconds: Callable[[Any], float] = float,
        sees_waits: bool = True,
    ) -> None:
        self.sees_waits = sees_waits  # whether the waits for messages are on the clock of ``now``
        self.now, self._seconds = now, seconds
        self._marked = Moments([], [], {}, [])

    def forward(self, module: int) -> None:
        self._marked.forwards.append((module, self.now()))

    def grad(self, param: int) -> None:
        self._marked.grads.append((param, self.now()))

    def mark(self, name: str) -> None:
        self._marked.marks[name] = self.now()

    def has(self, name: str) -> bool:
        """Return whether a moment of this name was marked."""
        return name in self._marked.marks

    def wait(self, start: float, end: float) -> None:
        self._marked.waits.append((start, end))

    def moments(self) -> Moments:
        return replace(self._marked.moved(self._seconds), waits=list(self._marked.waits))

    def compute(self) -> Moments:
        """Return the moments on a clock that stops during waits, if the watch's clock shows waits."""
        seen = self.moments()
        return seen.without(seen.waits) if self.sees_waits else seen


# -- the times of layers -------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Forward and backward seconds by layer, and the seconds outside of both."""

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

    ``owners`` has each module's layers, ``order`` all layers as the forward uses them. ``F`` are the begins
    of modules' forwards, ``g`` the arrivals of gradients. Waits for messages must have been taken out::

        begin     F0      F1      F2         turn     g2        g1        g0       enter   step      end
          |outside | fwd 0 | fwd 1 |  fwd 2   | bwd 2  |  bwd 1  |  bwd 0  | outside |       | outside |

    A module's forward is booked on its last layer in forward order; for tied weights, whose layer came
    earlier, on the layer reached before. ``turn`` is a third of the way from the last F to the first g: the
    last forward, the loss and the first backward lie between them. Where gradients accumulate over several
    backward passes, those between the first forward and the last backward count as the last module's
    forward: nothing waits for them, everything may hide under them.
    """
    marks = seen.marks
    if not seen.grads or not {"begin", "backward_end", "enter", "step", "end"} <= set(marks):
        return None
    first_param, first_grad = seen.grads[0]
    starts: dict[int, float] = {}
    for module, moment in seen.forwards:
        if moment < first_grad:
            starts.setdefault(module, moment)
    if not starts:
        return None
    ready: dict[int, float] = {}  # when each gradient of the last backward pass arrived
    last_pass = first_grad
    for i, moment in seen.grads:
        if i == first_param and i in ready:  # the first parameter again: another pass begins
            ready, last_pass = {}, moment
        ready[i] = moment
    sequence = sorted(starts.items(), key=lambda start: start[1])
    last_forward = sequence[-1][1]
    turn = last_forward + (first_grad - last_forward) / 3 + (last_pass - first_grad)

    forward, backward = [0.0] * len(order), [0.0] * len(order)
    place = {i: position for position, i in enumerate(order)}
    reached = 0
    for (module, start), (_, end) in zip(sequence, [*sequence[1:], (-1, turn)], strict=True):
        reached = max(reached, *(place[i] for i in owners[module][1]))
        forward[order[reached]] += end - start
    now = turn
    for i in reversed(order):
        end = max(now, ready.get(i, now))
        backward[i], now = end - now, end
    before, after = sequence[0][1] - marks["begin"], max(0.0, marks["enter"] - now)
    return Sample(forward, backward, max(0.0, before + after + marks["end"] - marks["step"]))


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


def disturbed(before: float, after: float, by: float = DISTURBED) -> bool:
    """Return whether the earlier iterations took so much longer that something else had the processor."""
    return before > BRIEF and before > (1 + by) * after


# -- the times of steps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The fields of ``reports.Metrics`` that are measured; on a GPU, its stream waited for ``exposed``."""

    step: float | None = None
    exposed: float | None = None
    link_busy: float | None = None
    bytes: float | None = None
    link_rate: float | None = None
    waits: tuple[float, ...] = ()
    steps: int = 0


class StepTimes:
    """Times every step since the last plan."""

    def __init__(self, now: Any, backend: Any) -> None:  # a Round and a Backend, whose files use this one
        self._round, self._backend = now, backend
        self.patience = PATIENCE
        self.restart()

    def restart(self) -> None:
        """Forget all times, because a new plan is installed."""
        self._count = 0
        self._periods: list[float] = []
        self._waits: deque[float] = deque(maxlen=KEPT)
        # The marks of steps that the device may not have finished.
        self._unread: deque[list[tuple[Any, Any]]] = deque()
        self._baseline: float | None = None
        self._compute: float | None = None  # of the first ``NOTICED`` steps
        self._last = time.monotonic()
        self._round.take_waits()
        self._round.waits_of_ranks.clear()

    def step(self) -> None:
        now, waits = time.monotonic(), self._round.take_waits()
        self._count += 1
        if self._count > SETTLE:
            self._periods.append(now - self._last)
            self._unread.append(waits)
            self._read_waits()
        if len(self._periods) > KEPT:
            del self._periods[:WINDOW]
        self._last = now
        if self._baseline is None and len(self._periods) == WINDOW:
            self._baseline = median(self._periods)
        if self._compute is None and len(self._waits) >= NOTICED:
            pairs = zip(self._periods, list(self._waits)[:NOTICED], strict=False)
            self._compute = median(period - waited for period, waited in pairs)

    def _read_waits(self) -> None:
        """Read the waits of all steps that the device has finished, without waiting for it."""
        while self._unread:
            waited = 0.0
            for before, after in self._unread[0]:
                end, start = self._backend.seconds(after), self._backend.seconds(before)
                if end is None or start is None:
                    return
                waited += end - start
            self._waits.append(waited)
            self._unread.popleft()

    def last_wait(self) -> int:
        """Return this rank's entry of ``waits_of_ranks``: microseconds plus 1; 0 before there is a wait."""
        return min(int(self._waits[-1] * 1e6), _MOST_MICROSECONDS) + 1 if self._waits else 0

    def has_drifted(self) -> bool:
        """Return whether the steps became so much slower or faster that the plan's times must be wrong."""
        if self._baseline is None or self._count < self.patience:
            return False
        return abs(median(self._periods[-WINDOW:]) / self._baseline - 1) > DRIFT

    def has_timed(self, steps: int) -> bool:
        """Return whether so many steps have been timed: from the same step on, on all ranks."""
        return self._count >= SETTLE + steps

    def median_step(self) -> float:
        """Return the median of the last steps; some must have been timed."""
        return median(self._periods)

    def contradicts(self, compute: float) -> bool:
        """Return whether the first steps needed much less compute than was measured."""
        return self._compute is not None and disturbed(compute, self._compute)

    @property
    def are_settled(self) -> bool:
        """Whether some steps have been taken since the last plan."""
        return self._count > SETTLE

    def may_replan_at_once(self) -> bool:
        """Return whether another forward order may start a new plan now.

        The first time it may at once, later only after more and more steps: a model may use another order in
        every step.
        """
        return self._count >= self.patience - PATIENCE

    def measured(self) -> Measured:
        if not self._periods:
            return Measured()
        known = [row for row in list(self._round.waits_of_ranks) if all(row)]
        seen = Measured(
            step=median(self._periods),
            exposed=median(self._waits) if self._waits else None,
            waits=tuple(median(wait - 1 for wait in column) / 1e6 for column in zip(*known, strict=True)),
            steps=len(self._periods),
        )
        events = self._backend.events(clear=False)
        steps = sorted(set(events["step"].tolist()))[-WINDOW - 1 : -1]
        by_step = [events[events["step"] == step] for step in steps]
        if not by_step:
            return seen
        busy = median(float((sent["end"] - sent["start"]).sum()) for sent in by_step)
        size = median(int(sent["bytes"].sum()) for sent in by_step)
        rate = size / busy if busy else None
        return replace(seen, link_busy=busy / median(self._periods), bytes=size, link_rate=rate)
