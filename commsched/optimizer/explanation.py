"""Reports of a ``DistributedOptimizer``: its plan, predicted and measured, and the operations it sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comm_core.engine import OPS
from scheduler.bounds import lower_bound
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.simulate.simulator import simulate


@dataclass(frozen=True)
class Explanation:
    """Times in seconds. ``measured`` figures are medians over the steps since the plan was installed."""

    policy: str
    plan: str
    hash: str
    transport: str
    buckets: tuple[tuple[int, tuple[str, ...]], ...]
    link: str
    profile_source: str
    predicted_period: float
    predicted_exposed: float
    predicted_utilisation: float
    bound: float
    measured_period: float | None
    measured_exposed: float | None
    measured_utilisation: float | None
    steps: int
    program: Program
    profile: Profile

    def __str__(self) -> str:
        rows = [
            ("iteration", _ms(self.predicted_period), _ms(self.measured_period)),
            ("exposed communication", _ms(self.predicted_exposed), _ms(self.measured_exposed)),
            ("link busy", _percent(self.predicted_utilisation), _percent(self.measured_utilisation)),
        ]
        lines = [
            f"policy {self.policy}, plan {self.hash}, {len(self.buckets)} buckets over transport"
            f" {self.transport}",
            f"link {self.link}; times: {self.profile_source}",
            f"order: {self.plan}",
            f"{'':24}{'predicted':>12}{'measured':>12}   ({self.steps} steps)",
            *(f"{name:24}{left:>12}{right:>12}" for name, left, right in rows),
            f"{'no schedule is below':24}{_ms(self.bound):>12}",
        ]
        for number, (size, names) in enumerate(self.buckets):
            few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"  bucket {number}: {size / 2**20:.2f} MiB: {few}")
        return "\n".join(lines)


def explain(optimizer: Any, show: bool = True) -> Explanation | None:
    """Return the plan of a ``DistributedOptimizer``, predicted and measured, and print it with ``show``.

    Returns None on one rank, and where gradients are reduced at step time without a plan.
    """
    driver = getattr(optimizer, "_driver", None)
    if driver is None:
        if show:
            print(
                "commsched: nothing is communicated (one rank), or the gradients are reduced at step time"
                " without a plan"
            )
        return None
    plan = driver.plan
    program, profile, link = plan.program, plan.profile, plan.link
    result = simulate(program, profile, link)
    names = [layer.name for layer in profile.layers]
    measured = driver.measured()
    explanation = Explanation(
        policy=program.policy,
        plan=program.plan,
        hash=program.hash,
        transport=driver.backend.name,
        buckets=tuple(
            (b.bytes, tuple(dict.fromkeys(names[p.layer] for p in b.pieces))) for b in program.buckets
        ),
        link=str(link),
        profile_source=profile.source or profile.name,
        predicted_period=result.period,
        predicted_exposed=result.exposed,
        predicted_utilisation=result.link_utilisation,
        bound=lower_bound(
            profile, link, gather=program.gather, early_step=program.early_step, ranks=program.ranks
        ),
        measured_period=measured.period,
        measured_exposed=measured.exposed,
        measured_utilisation=measured.utilisation,
        steps=measured.steps,
        program=program,
        profile=profile,
    )
    if show:
        print(explanation)
    return explanation


@dataclass(frozen=True)
class Operation:
    """One collective on a bucket. Times are ``time.monotonic()``'s; its input was complete at ``ready``."""

    step: int
    kind: str  # "RS", "AG" or "AR"
    bucket: int
    ready: float
    start: float
    end: float
    bytes: int  # sent by this rank

    @property
    def label(self) -> str:
        return f"{self.kind}{self.bucket}"


def operations(optimizer: Any) -> list[Operation]:
    """Return the last operations on a ``DistributedOptimizer``'s buckets, oldest first.

    Bucket numbers behind those of ``explain(optimizer)`` are flags. Empty where ``explain`` gives None.
    """
    driver = getattr(optimizer, "_driver", None)
    events = driver.backend.events(clear=False) if driver is not None else ()
    return [
        Operation(step, OPS[kind], bucket, ready, start, end, size)
        for step, kind, bucket, ready, start, end, size in (event.tolist() for event in events)
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.0f} %"
