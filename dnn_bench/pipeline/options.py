"""Options and result of a pipeline's measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Options:
    """What to measure; the help texts in ``cli`` explain each field."""

    model: str
    schedule: str = "1f1b"
    depth: int = 2
    replicas: list[int] = field(default_factory=list)
    ranks: list[list[int]] | None = None
    hosts: list[list[int]] | None = None
    cuts: list[int | str] | None = None
    plan: str = ""
    rows: int = 0
    microbatches: int = 4
    placement: str = "bubble"
    recompute: bool | list[bool] = False
    warmup: int = 4
    steps: int = 10
    rounds: int = 1
    layers: int = 0
    seconds: float = 0.005
    layer_bytes: int = 256
    hop: int = 1
    peer: bool = False
    against: str = ""
    json: bool = False


class Ratio(NamedTuple):
    """The median of ratios, and between which bounds the true one lies with 95 % confidence, whatever the
    scatter looks like (with fewer than six ratios these are the smallest and the largest, which says less).
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, others: Sequence[float], ours: Sequence[float]) -> Ratio:
        """Of times taken in turn: within a round, since machines change their speed from one to the next."""
        found = sorted(other / mine for other, mine in zip(others, ours, strict=True))
        # How many of n lie below the true median is binomial: about n / 2, with a deviation of sqrt(n) / 2.
        outside = max(0, math.floor((len(found) - 1 - 1.96 * math.sqrt(len(found))) / 2))
        return cls(statistics.median(found), found[outside], found[-1 - outside])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass
class Result:
    """Seconds of a step and bubbles, measured and simulated. ``reached``: throughput over that of a pipeline
    without bubbles, whose slowest rank always computes. ``ratio``: throughput over the peer's. ``gain``: over
    that of the other placement, measured and simulated. ``handling``: what the slowest rank needs between two
    actions.
    """

    model: str
    schedule: str
    delays: tuple[int, ...]
    period: float
    simulated: float
    bubble: float
    simulated_bubble: float
    reached: float
    rows: int
    losses: list[float]
    peer: float | None = None
    ratio: Ratio | None = None
    gain: Ratio | None = None
    simulated_gain: float | None = None
    difference: float | None = None
    handling: float = 0.0

    def __post_init__(self) -> None:
        # As JSON has them, they are lists.
        self.ratio = None if self.ratio is None else Ratio(*self.ratio)
        self.gain = None if self.gain is None else Ratio(*self.gain)
