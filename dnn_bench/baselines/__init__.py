"""The baselines of a comparison: real peers as their documentation uses them, limits, and our schedules.

>>> from dnn_bench import baselines
>>> baselines.names()
>>> trainer = baselines.start("ddp_4mb", job)  # in every rank, under the launcher the baseline asks for
>>> trainer.iteration(*trainer.job.local_batch(trainer.rank))

Importing this package does not import torch, so that listing the names is quick.
"""

from dnn_bench.baselines.registry import LIMIT, OURS, PEER, ROUNDED, Baseline, MissingPeer, get, names, start

__all__ = ["LIMIT", "OURS", "PEER", "ROUNDED", "Baseline", "MissingPeer", "get", "names", "start"]
