"""The environment of a rank: how it finds the others, and the port on which they meet."""

from __future__ import annotations

import os
import socket
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


class HeldPort:
    """A TCP port of this machine that no other process is given while this object lives.

    Ranks need seconds to start. A port that is looked up and released may be another process's by then. This
    one stays bound. It does not listen, and both sides allow the reuse of addresses (torch's stores do), so a
    rank can listen on it all the same.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()
