"""The result of a pipeline's measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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

    def described(self) -> str:
        lines = [
            f"{self.schedule} of {self.model}: {self.period * 1e3:.2f} ms per step,"
            f" {self.rows / self.period:.1f} rows per second; delays {' '.join(map(str, self.delays))}",
            f"  simulated {self.simulated * 1e3:.2f} ms ({self.simulated / self.period - 1:+.1%})",
            f"  bubble {self.bubble:.1%}, simulated {self.simulated_bubble:.1%};"
            f" {self.reached:.3f} of the rate without any; {self.handling * 1e3:.2f} ms between two actions",
            f"  losses {self.losses[0]:.6f} ... {self.losses[-1]:.6f}",
        ]
        if self.peer is not None:
            torchs = f"torch.distributed.pipelining {self.peer * 1e3:.2f} ms"
            lines.append(f"  {torchs}: {self.ratio} times its throughput")
        if self.gain is not None:
            gain = f"{self.gain} times the throughput of the other placement"
            lines.append(f"  {gain}, simulated {self.simulated_gain:.3f}")
        if self.difference is not None:
            lines.append(f"  largest relative difference of a loss {self.difference:.1e}")
        return "\n".join(lines)
