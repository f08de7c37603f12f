"""Pipeline parallelism: a model's stages on different ranks, by any schedule of ``scheduler.pipelines``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsched.pipeline.api import Pipeline as Pipeline
    from commsched.pipeline.chain import Chain as Chain
    from commsched.pipeline.chain import split as split
    from commsched.pipeline.job import Job as Job
    from commsched.pipeline.messages import ThreadWorld as ThreadWorld
    from commsched.pipeline.profiling import profile as profile

_HOME = {
    "Pipeline": "api",
    "Chain": "chain",
    "split": "chain",
    "ThreadWorld": "messages",
    "Job": "job",
    "profile": "profiling",
}

__all__ = ["Chain", "Job", "Pipeline", "ThreadWorld", "profile", "split"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
