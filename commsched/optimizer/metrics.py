"""What communication costs: measured and predicted times of a step, in one object.

print(commsched.metrics(optimizer))
commsched.log_metrics(optimizer, writer, step)    # a tensorboard SummaryWriter
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from commsched.backends.ranks import Ranks
from commsched.optimizer.measuring import StepTimes
from commsched.optimizer.planning import Plan


@dataclass(frozen=True)
class Metrics:
    """Times in seconds: medians over the last steps, None before there are any.

    ``exposed`` is the time in which the compute waited for communication. ``predicted_*`` comes from
    simulating the plan, ``ddp_*`` from simulating torch's DDP on the same profile and link. ``bytes``: sent
    by this rank in a step. ``link_busy``: the part of a step in which the link works; ``link_rate``: bytes
    per second that this rank sends then. ``waits``: every rank's ``exposed``, sent with each step's flags.
    """

    steps: int
    rank: int
    ranks: int
    policy: str
    step: float | None
    exposed: float | None
    bytes: float | None
    link_rate: float | None
    link_busy: float | None
    waits: tuple[float, ...]
    predicted_step: float | None
    predicted_exposed: float | None
    predicted_link_busy: float | None
    ddp_step: float | None
    ddp_exposed: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name, for JSON."""
        return {**asdict(self), "waits": list(self.waits)}

    def to_scalars(self) -> dict[str, float]:
        """Return the figures that are known, by name; ``waits`` as ``wait_of_rank_0`` and so on."""
        left_out = ("rank", "ranks", "policy", "waits")
        known = {k: float(v) for k, v in self.to_dict().items() if k not in left_out and v is not None}
        return known | {f"wait_of_rank_{rank}": wait for rank, wait in enumerate(self.waits)}

    @property
    def line(self) -> str:
        """The figures in one line, for logs."""
        each = "/".join(f"{wait * 1e3:.1f}" for wait in self.waits)
        waits = f", waits of ranks {each} ms" if each else ""
        return (
            f"commsched: step {milliseconds(self.step)}, exposed communication {milliseconds(self.exposed)}"
            f" (predicted {milliseconds(self.predicted_exposed)}, DDP {milliseconds(self.ddp_exposed)}),"
            f" {megabytes(self.bytes)} per step at {megabytes(self.link_rate)}/s{waits}"
        )

    def __str__(self) -> str:
        rows = [
            ("", "measured", "predicted", "DDP, simulated"),
            ("step", *map(milliseconds, (self.step, self.predicted_step, self.ddp_step))),
            (
                "exposed communication",
                *map(milliseconds, (self.exposed, self.predicted_exposed, self.ddp_exposed)),
            ),
            ("link busy", percent(self.link_busy), percent(self.predicted_link_busy), ""),
            ("sent per step", megabytes(self.bytes), "", ""),
            ("link rate", f"{megabytes(self.link_rate)}/s", "", ""),
        ]
        rows += [(f"wait of rank {rank}", milliseconds(wait), "", "") for rank, wait in enumerate(self.waits)]
        head = f"policy {self.policy}, rank {self.rank} of {self.ranks}, medians of {self.steps} steps"
        lines = (f"{what:24}{ours:>14}{plan:>14}{ddp:>16}".rstrip() for what, ours, plan, ddp in rows)
        return "\n".join([head, *lines])


def metrics(optimizer: Any) -> Metrics | None:
    """Return what communication costs a ``DistributedOptimizer``; any rank may call it alone.

    Returns None on one rank, and where gradients are reduced at step time without a plan. The first call
    after a new plan simulates the plan, which takes about a second.
    """
    driver = getattr(optimizer, "_driver", None)
    if driver is None:
        return None
    return metrics_of(driver.times, driver.plan, driver.backend.ranks)


def metrics_of(times: StepTimes, plan: Plan, ranks: Ranks, simulated: bool = True) -> Metrics:
    """Return the figures of a plan; the plan's predictions are None unless ``simulated``."""
    predicted = plan.prediction if simulated else None
    return Metrics(
        rank=ranks.rank,
        ranks=ranks.size,
        policy=plan.program.policy,
        predicted_step=predicted.period if predicted else None,
        predicted_exposed=predicted.exposed if predicted else None,
        predicted_link_busy=predicted.utilisation if predicted else None,
        ddp_step=predicted.ddp_period if predicted else None,
        ddp_exposed=predicted.ddp_exposed if predicted else None,
        **vars(times.measured()),
    )


def log_metrics(optimizer: Any, writer: Any, step: int) -> None:
    """Write the figures as scalars ``commsched/...`` with a tensorboard ``SummaryWriter``."""
    found = metrics(optimizer)
    for name, value in (found.to_scalars() if found is not None else {}).items():
        writer.add_scalar(f"commsched/{name}", value, step)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.0f} %"


def megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f} MB"
