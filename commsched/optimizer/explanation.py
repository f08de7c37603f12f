"""Reports of a ``DistributedOptimizer``: its plan, predicted and measured, and the operations it sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comm_core.engine import OPS
from commsched.collectives.compression import block_code
from commsched.optimizer.metrics import Metrics, metrics_of, milliseconds
from commsched.optimizer.model_layers import SHARE
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program


@dataclass(frozen=True)
class Explanation:
    """The plan; its times, in seconds, are in ``metrics``. No schedule takes less time than ``bound``."""

    policy: str
    plan: str
    hash: str
    transport: str
    buckets: tuple[tuple[int, tuple[str, ...]], ...]
    by_rows: Mapping[str, int]  # parameters of which only touched rows travel, and their bytes in memory
    tied: tuple[str, ...]  # of these, those of which the head's part travels first, then rows that correct it
    link: str
    profile_source: str
    bound: float
    quantised: tuple[str, ...]  # by bucket: to what its gradients are quantised, int8, fp8 or ""
    metrics: Metrics
    program: Program
    profile: Profile

    def __str__(self) -> str:
        lines = [
            f"plan {self.hash}, {len(self.buckets)} buckets over transport {self.transport}",
            f"link {self.link}; times: {self.profile_source}",
            f"order: {self.plan}",
            str(self.metrics),
            f"no schedule is below {milliseconds(self.bound)}",
        ]
        for number, (size, names) in enumerate(self.buckets):
            whole = sum(self.by_rows.get(name, 0) for name in names)
            what = (
                "rows that correct the head's" if self.tied and names[0] in self.tied else "touched rows of"
            )
            rows = f", {what} {whole / 2**20:.2f} MiB" if whole else ""
            code = self.quantised[number]
            wire = f", gradients as {code} {size * SHARE / 2**20:.2f} MiB" if code else ""
            lines.append(f"  bucket {number}: {size / 2**20:.2f} MiB{wire}: {_few(names)}{rows}")
        return "\n".join(lines)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    plan, model = driver.plan, driver.planner.model
    program, profile, link = plan.program, plan.profile, plan.link
    names, code = [layer.name for layer in profile.layers], block_code(optimizer._options.wire_dtype)
    explanation = Explanation(
        policy=program.policy,
        plan=program.plan,
        hash=program.hash,
        transport=driver.backend.name,
        buckets=tuple(
            (b.bytes, tuple(dict.fromkeys(names[p.layer] for p in b.pieces))) for b in program.buckets
        ),
        by_rows={model.names[i]: model.bytes(i) for i in model.rows},
        tied=tuple(model.names[i] for i in model.heads if i in model.rows),
        link=str(link),
        profile_source=profile.source or profile.name,
        bound=plan.prediction.bound,
        quantised=tuple(code if model.quantises(b.group) else "" for b in program.buckets),
        metrics=metrics_of(driver.times, plan, driver.backend.ranks),
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
