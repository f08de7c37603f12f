"""Pipelines for jobs: of a plan, of a schedule's name, or of one stage, which takes any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import commsched
from commsched.pipeline import Chain, Job, Pipeline
from scheduler.formats.pipeline_plan import PipelinePlan

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
    on_step: Any = None,
) -> Pipeline:
    """This rank's part. ``stages`` by default as many as ranks and replicas leave."""
    common: dict[str, Any] = {"loss": job.loss, "optimizer": job.optimizer, "on_step": on_step}
    if plan is not None:
        return Pipeline(job.model, plan=plan, **common)
    size = commsched.size()
    if stages is None:
        stages = len(replicas) if isinstance(replicas, Sequence) else size // replicas
        if isinstance(replicas, int) and stages * replicas != size:
            raise ValueError(f"{size} ranks do not divide into {replicas} replicas; set --stages, --replicas")
    if stages > 1:
        return Pipeline(job.model, schedule, microbatches, (stages, replicas), cuts=cuts, **common)
    if cuts and list(cuts) != [0]:
        raise ValueError(f"one stage has no cuts, got {list(cuts)}; set --stages, or start more ranks")
    # The whole model is one layer: it need not be traced. Without stages every schedule is this one.
    whole = Chain([job.model], elements=True)
    return Pipeline(whole, "gpipe", microbatches, (1, replicas), **common)


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """The whole model's state_dict, as the job's own model has it; every rank must call."""
    state = pipeline.state_dict()
    if pipeline.layout.stages > 1 or not all(name.startswith(_WHOLE) for name in state):
        return state
    return {name.removeprefix(_WHOLE): value for name, value in state.items()}
