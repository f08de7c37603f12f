"""What a step would cost: one profile simulated over several links and with fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scheduler import policies
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.policies.prediction import simulate_ddp
from scheduler.simulate.simulator import Result, simulate

BANDWIDTHS = (2, 10)


@dataclass(frozen=True)
class Times:
    """Seconds of a step, and of it those in which the compute waits for communication."""

    step: float
    exposed: float

    @classmethod
    def of(cls, result: Result, compute: float) -> Times:
        return cls(result.period, max(0.0, result.period - compute))


@dataclass(frozen=True)
class Row:
    """One setting with DDP and with commsched, both simulated."""

    setting: str
    ddp: Times
    commsched: Times


@dataclass(frozen=True)
class Measurement:
    """What was measured of a script. ``profile``: its compute without traffic. ``itemsizes``: bytes of one
    element, by layer. ``slowdown``: compute takes ``1 + slowdown`` times as long while the link is busy.
    ``now``: DDP's own times.
    """

    script: str
    ranks: int
    steps: int
    profile: Profile
    itemsizes: tuple[int, ...]
    link: Link
    slowdown: float
    now: Times

    def on_the_wire(self, itemsize: int) -> Profile:
        """Return the profile with elements of at most ``itemsize`` bytes."""
        layers = (
            replace(layer, bytes=layer.bytes // own * min(own, itemsize)) if layer.bytes else layer
            for layer, own in zip(self.profile.layers, self.itemsizes, strict=True)
        )
        return replace(self.profile, layers=tuple(layers))


@dataclass(frozen=True)
class Forecast:
    """The measurement and its rows; ``pictures`` holds the two simulated steps of the first row."""

    measured: Measurement
    rows: tuple[Row, ...]
    pictures: tuple[Result, Result]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures, for JSON; times in seconds."""
        measured = self.measured
        return {
            "script": measured.script,
            "ranks": measured.ranks,
            "steps": measured.steps,
            "bytes": measured.profile.total_bytes,
            "compute": measured.profile.compute,
            "link": measured.link.to_dict(),
            "slowdown": measured.slowdown,
            "now": asdict(measured.now),
            "rows": [asdict(row) for row in self.rows],
        }


def forecast(measured: Measurement) -> Forecast:
    """Simulate DDP and commsched on the measured link, with fewer bytes, and on faster links."""
    link = measured.link
    settings: list[tuple[str, Profile, Link]] = [
        ("this link", measured.profile, link),
        ("bf16 on the wire", measured.on_the_wire(2), link),
        ("int8 or fp8 on the wire", measured.on_the_wire(1), link),
    ]
    settings += [
        (f"{factor} times the bandwidth", measured.profile, replace(link, beta=link.beta / factor))
        for factor in BANDWIDTHS
    ]
    results = [_simulated(measured, profile, link) for _, profile, link in settings]
    compute = measured.profile.compute
    rows = [
        Row(name, Times.of(ddp, compute), Times.of(ours, compute))
        for (name, _, _), (ddp, ours) in zip(settings, results, strict=True)
    ]
    return Forecast(measured, tuple(rows), results[0])


def _simulated(measured: Measurement, profile: Profile, link: Link) -> tuple[Result, Result]:
    program = policies.plan(profile, link, "optimal", ranks=measured.ranks)
    return (
        simulate_ddp(profile, link, measured.ranks, measured.slowdown),
        simulate(program, profile, link, slowdown=measured.slowdown),
    )


def slowdown_of(busy: Sequence[float], free_cores: bool) -> float:
    """Return the slowdown from each rank's processor time per second of communication.

    Without a free core, communication and compute share one: compute gets what communication leaves.
    """
    share = 0.0 if free_cores else min(0.9, sum(busy) / len(busy))
    return share / (1 - share)
