"""The environment of a rank: how it finds the others."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(threads: int = 1) -> dict[str, str]:
    """Variables for every rank: its threads, this checkout importable, the plan at a known step."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path not in ("", str(ROOT))]
    path = os.pathsep.join([str(ROOT), *others])
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "COMMSCHED_WAIT_FOR_PLAN": "1"}


def rank_variables(
    rank: int, size: int, local_rank: int, local_size: int, address: str, port: int
) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
