"""The collectives behind a device's buckets: NCCL in the stream, or a CPU transport through the host.

They work in place on a flat bucket: after ``reduce_scatter`` this rank's shard holds the sum, ``all_gather``
fills in the others' shards.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from commsched.backends.cuda_device import Device
from commsched.backends.ranks import Ranks
from commsched.backends.transports import make_transport
from commsched.collectives.current_carrier import carrier
from commsched.collectives.private_groups import private_group
from commsched.env import settings
from commsched.process.groups import device_name, nccl_usable


class Collectives(Protocol):
    """``scales``: whether ``reduce_scatter`` applies ``postscale``; otherwise the bucket must come scaled."""

    name: str
    scales: bool

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None: ...

    def all_gather(self, bucket: torch.Tensor) -> None: ...

    def abort(self, reason: str) -> None:
        """End operations in flight, because another rank is gone. May be called from any thread."""

    def close(self) -> None:
        """Close the group's connections. No operation may be in flight."""


class NcclCollectives:
    """Runs in the current stream; the host never waits. ``group`` is a ``ProcessGroupNCCL`` of its own."""

    name, scales = "nccl", False

    def __init__(self, group: Any) -> None:
        self.group = group
        self._ending, self._ended = threading.Lock(), False
        self._rank, self._size = group.rank(), group.size()
        self._reduce = ReduceScatterOptions()
        self._gather = AllgatherOptions()
        for options in (self._reduce, self._gather):
            # Use the caller's stream; older versions of torch use their own stream and join it.
            if hasattr(options, "asyncOp"):
                options.asyncOp = False

    def _shard(self, bucket: torch.Tensor) -> torch.Tensor:
        part = bucket.numel() // self._size
        return bucket.narrow(0, self._rank * part, part)

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._join(self.group._reduce_scatter_base(self._shard(bucket), bucket, self._reduce))

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._join(self.group._allgather_base(bucket, self._shard(bucket), self._gather))

    def _join(self, work: Any) -> None:
        if work is not None:
            work.wait()  # the current stream waits, not the host

    def abort(self, reason: str) -> None:
        if self._ends_now() and hasattr(self.group, "abort"):
            self.group.abort()

    def close(self) -> None:
        if self._ends_now():
            self.group.shutdown()

    def _ends_now(self) -> bool:
        """Return whether this is the first call: abort and close may come from two threads."""
        with self._ending:
            first, self._ended = not self._ended, True
            return first


class StagedCollectives:
    """Runs through the host's memory and a CPU transport, and blocks; for CPU tensors and shared GPUs."""

    name, scales = "staged", True

    def __init__(self, transport: Any, device: Device) -> None:
        self._transport, self._device = transport, device
        self._count = 0

    def _next(self) -> int:
        self._count += 1
        return self._count

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        staged = bucket.cpu()
        self._transport.reduce_scatter(staged, postscale=postscale, step=self._next())
        self._copy_back(bucket, staged)

    def all_gather(self, bucket: torch.Tensor) -> None:
        staged = bucket.cpu()
        self._transport.all_gather(staged, step=self._next())
        self._copy_back(bucket, staged)

    def _copy_back(self, bucket: torch.Tensor, staged: torch.Tensor) -> None:
        if staged is not bucket:
            bucket.copy_(staged)

    def abort(self, reason: str) -> None:
        self._transport.abort(reason)

    def close(self) -> None:
        self._transport.close("the optimizer is closed")


def collectives_for(ranks: Ranks, device: Device, channel: int) -> Collectives:
    """Return NCCL's collectives if every rank has a GPU of its own, else those through the host."""
    example = torch.empty(0, device=device.device)
    names = ranks.all_values(device_name((example,), carrier().launch.node))
    if nccl_usable(names):
        return NcclCollectives(private_group(ranks.process_set, channel, "cuda"))
    _, transport = make_transport("auto", ranks.process_set, channel, settings().timeout)
    return StagedCollectives(transport, device)
