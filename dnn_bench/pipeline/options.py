"""What a measurement of a pipeline is asked for, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Options:
    """What is measured; ``cli`` says what each means."""

    model: str
    schedule: str = "1f1b"
    depth: int = 2
    replicas: list[int] = field(default_factory=list)
    ranks: list[list[int]] | None = None
    hosts: list[list[int]] | None = None
    cuts: list[int] | None = None
    plan: str = ""
    rows: int = 0
    microbatches: int = 4
    placement: str = "bubble"
    recompute: bool = False
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


@dataclass
class Result:
    """Seconds of a step and bubbles, measured and simulated. ``reached``: throughput over that of a pipeline
    without bubbles, whose slowest rank always computes. ``ratio``: throughput over the peer's. ``gain``: over
    that of the other placement, measured and simulated.
    """

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
    ratio: float | None = None
    gain: float | None = None
    simulated_gain: float | None = None
    difference: float | None = None
