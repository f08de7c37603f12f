"""When a rank computed, and what it needed between one action and the next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from scheduler.ir.actions import Action


class Span(NamedTuple):
    """One computation and its time (seconds of ``time.perf_counter``). ``waited``: the seconds that this
    rank had waited for messages and sums until then, since it began.
    """

    action: Action
    start: float
    end: float
    waited: float


def handling(spans: Sequence[Span]) -> float:
    """Seconds between one action and the next in which nothing is waited for: the rank hands on what it has
    computed and takes up what is next.
    """
    gaps = [(b.start - a.end) - (b.waited - a.waited) for a, b in pairwise(spans)]
    return statistics.median(gaps) if gaps else 0.0
