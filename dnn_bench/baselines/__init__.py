"""The baselines of a comparison: real peers as their documentation uses them, limits, and our schedules.

>>> from dnn_bench import baselines
>>> baselines.names()
>>> trainer = baselines.start("ddp_4mb", job)  # in every rank, under the launcher the baseline asks for
>>> trainer.iteration(*trainer.job.local_batch(trainer.rank))

Importing this package does not import torch (`Job` does, on first use), so that listing the names is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dnn_bench.baselines.registry import LIMIT, OURS, PEER, Baseline, MissingPeer, get, names, start

if TYPE_CHECKING:
    from dnn_bench.baselines.job import Job as Job

__all__ = ["LIMIT", "OURS", "PEER", "Baseline", "Job", "MissingPeer", "get", "names", "start"]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dnn_bench.baselines.job import Job

    return Job
