"""Pipelines for jobs: of a plan, of a schedule's name, or of one stage, which takes any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import commsched
from commsched.collectives.current_carrier import carrier
from commsched.pipeline import Chain, Job, Pipeline
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.pipelines.schedules import bundle_ranks, bundle_ranks_across

_WHOLE = "0."
"""Before the names of a model that is the only element of a chain."""


def pipeline_of(
    job: Job,
    plan: PipelinePlan | None = None,
    *,
    schedule: str = "1f1b",
    stages: int | None = None,
    replicas: int | Sequence[int] = 1,
    microbatches: int = 1,
    cuts: Sequence[int | str] | None = None,
    across: bool = False,
    on_step: Any = None,
) -> Pipeline:
    """This rank's part. ``stages`` by default as many as ranks and replicas leave. ``across``: a bundle's
    fronts and rears are on different hosts.
    """
    common: dict[str, Any] = {
        "loss": job.loss,
        "count": job.count,
        "optimizer": job.optimizer,
        "on_step": on_step,
    }
    if plan is not None:
        return Pipeline(job.model, plan=plan, **common)
    size = commsched.size()
    if stages is None:
        stages = len(replicas) if isinstance(replicas, Sequence) else size // replicas
        if isinstance(replicas, int) and stages * replicas != size:
            raise ValueError(f"{size} ranks do not divide into {replicas} replicas; set --stages, --replicas")
    if stages > 1 and schedule == "bundle":
        common |= _bundles(across)
    if stages > 1:
        return Pipeline(job.model, schedule, microbatches, (stages, replicas), cuts=cuts, **common)
    if cuts and list(cuts) != [0]:
        raise ValueError(f"one stage has no cuts, got {list(cuts)}; set --stages, or start more ranks")
    # The whole model is one layer: it need not be traced. Without stages every schedule is this one.
    whole = Chain([job.model], elements=True)
    return Pipeline(whole, "gpipe", microbatches, (1, replicas), **common)


def _bundles(across: bool) -> dict[str, Any]:
    """The ranks of fronts and rears, and the groups of ranks that sum gradients on their own host first."""
    nodes = commsched.allgather_object(carrier().launch.node)
    hosts = [[rank for rank, node in enumerate(nodes) if node == each] for each in dict.fromkeys(nodes)]
    if len({len(host) for host in hosts}) > 1 or hosts != sorted(hosts) or len(nodes) % 2:
        raise ValueError(
            f"bundles need equally many ranks on each host, an even number in all; the hosts have {hosts}"
        )
    count, each = len(hosts), len(hosts[0])
    if across:
        return {"ranks": bundle_ranks_across(count, each), "hosts": hosts}
    if each % 2:
        raise ValueError(
            f"each host needs a front and a rear, and has {each} ranks; use --across for fronts and rears on"
            " different hosts"
        )
    return {"ranks": bundle_ranks(count, (each // 2, each // 2)), "hosts": hosts}


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """The whole model's state_dict, as the job's own model has it; every rank must call."""
    state = pipeline.state_dict()
    if pipeline.layout.stages > 1 or not all(name.startswith(_WHOLE) for name in state):
        return state
    return {name.removeprefix(_WHOLE): value for name, value in state.items()}
