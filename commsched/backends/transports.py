"""Which transport carries the optimizer's buckets.

``direct`` and ``ring`` exchange messages over TCP connections of their own, ``gloo`` does the same as
``direct`` over torch's connections, and ``horovod`` calls Horovod's operations. Horovod and the launcher keep
start-up and control whatever moves the bytes.
"""

from __future__ import annotations

from typing import Any

import torch

import comm_core
from commsched.collectives.current_carrier import carrier
from commsched.collectives.data_movement import allgather
from commsched.collectives.private_groups import data_channel, private_group
from commsched.collectives.process_sets import ProcessSet
from commsched.collectives.reductions import Sum, allreduce_, reducescatter
from commsched.env import settings

NAMES = ("direct", "ring", "gloo", "horovod")
OVER_GROUPS = ("gloo",)  # torch's connections do not notice that a host is lost

# Up to this many ranks `direct` is faster; beyond it, the fewer connections of a ring win.
_LARGEST_DIRECT = 8


def choose(name: str | None, size: int) -> str:
    """Return the transport of argument or ``COMMSCHED_TRANSPORT``, else the fastest for ``size`` ranks."""
    wanted = (name or settings().transport or "auto").lower()
    if wanted == "auto":
        return "direct" if size <= _LARGEST_DIRECT else "ring"
    if wanted not in NAMES:
        raise ValueError(f"there is no transport {wanted!r}; the transports are auto, {', '.join(NAMES)}")
    return wanted


def make_transport(
    name: str | None, process_set: ProcessSet, channel: int, timeout: float
) -> tuple[str, Any]:
    """Return the transport's name and object. Collective: every rank of the process set must call."""
    rank, size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]
    chosen = choose(name, size)
    transport: Any
    if chosen == "horovod":
        transport = comm_core.PythonTransport(HorovodCollectives(process_set))
    else:
        kind = comm_core.RingTransport if chosen == "ring" else comm_core.DirectTransport
        link: Any
        if chosen == "gloo":
            link = comm_core.C10dChannel(private_group(process_set, channel))
        else:
            link = data_channel(process_set, channel=channel)
        transport = kind(link, rank, size)
    transport.set_timeout(timeout)
    return chosen, transport


class HorovodCollectives:
    """Horovod's operations with the interface of the engine's Python transport: blocking, in place."""

    def __init__(self, process_set: ProcessSet) -> None:
        if carrier().name != "horovod":
            raise ValueError(
                "transport='horovod' needs Horovod to carry this job; start it with horovodrun or set"
                " COMMSCHED_RUNTIME=horovod"
            )
        self._process_set = process_set
        self.rank, self.size = int(process_set.rank()), int(process_set.size())  # type: ignore[arg-type]

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        shard.copy_(reducescatter(full, op=Sum, name=name, process_set=self._process_set))

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        full.copy_(allgather(shard, name=name, process_set=self._process_set))

    def sum(self, full: torch.Tensor, name: str) -> None:
        allreduce_(full, op=Sum, name=name, process_set=self._process_set)
