"""The check of ``master_weights=True``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HALVES = (torch.float16, torch.bfloat16)


def check_master_weights(gather: str, params: Sequence[torch.Tensor], planned: bool, included: bool) -> None:
    """Raise for options with which ``master_weights=True`` is not possible."""
    if gather != "parameters":
        raise ValueError(
            "master_weights=True keeps float32 weights for each rank's shards, and with"
            f" gather={gather!r} there are none; use gather='parameters'"
        )
    if not any(param.dtype in HALVES for param in params):
        found = ", ".join(sorted({str(param.dtype) for param in params}))
        raise ValueError(
            "master_weights=True is for float16 and bfloat16 parameters, and these are all"
            f" {found}; leave it out"
        )
    if not planned:
        raise ValueError(
            "master_weights=True needs buckets, and Adasum, compressors of your own, transport='plain' and"
            " parameters on several devices are reduced one by one; leave it out"
        )
    if not included:
        raise ValueError("master_weights=True on a rank outside of process_set, which has no shards")

