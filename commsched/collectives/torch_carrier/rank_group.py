"""What moves bytes under the torch engine: three primitives, over gloo for CPU tensors and over NCCL for
GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp

REDUCERS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class Wires(ABC):
    """The ranks of one process set, numbered from 0. Tensors are flat and contiguous; calls are in one
    order."""

    rank: int
    size: int

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def abort(self) -> None:
        """Close the connections; whoever waits in a collective gets an error."""
        with suppress(AttributeError, RuntimeError):  # before torch 2.8 gloo groups could not be aborted
            self._group.abort()

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, how: str) -> None:
        """Combine `tensor` over all ranks, in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Rank `root`'s bytes into every rank's `tensor`."""

    @abstractmethod
    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to rank i and receive ``incoming[i]`` from it; sizes may differ, also be
        zero."""


class GlooWires(Wires):
    """CPU tensors over gloo."""

    def reduce(self, tensor: torch.Tensor, how: str) -> None:
        if self.size == 1 or tensor.numel() == 0:
            return
        options = AllreduceOptions()
        options.reduceOp = REDUCERS[how]
        self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.size == 1 or tensor.numel() == 0:
            return
        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor.view(torch.uint8)], options).wait()

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        # Point to point: on TCP it fills both directions of the link, which gloo's own all-to-all does not.
        # All receives first: gloo announces one on the connection that carries the other direction's data.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self._group.recv([incoming[p]], p, 0) for p in reversed(peers) if incoming[p].numel()]
        works += [self._group.send([outgoing[p]], p, 0) for p in peers if outgoing[p].numel()]
        incoming[self.rank].copy_(outgoing[self.rank])
        for work in works:
            work.wait()


class NcclWires(Wires):
    """GPU tensors over NCCL, each rank on a GPU of its own."""

    def reduce(self, tensor: torch.Tensor, how: str) -> None:
        if tensor.numel():
            options = AllreduceOptions()
            options.reduceOp = REDUCERS[how]
            self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank = root
            self._group.broadcast([tensor.view(torch.uint8)], options).wait()

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        # One all-to-all of bytes: NCCL needs sends and receives in one group, and this is that group.
        packed = torch.cat([tensor.view(torch.uint8) for tensor in outgoing])
        received = packed.new_empty(sum(tensor.numel() * tensor.element_size() for tensor in incoming))
        sizes = [[tensor.numel() * tensor.element_size() for tensor in side] for side in (incoming, outgoing)]
        self._group.alltoall_base(received, packed, *sizes).wait()
        for tensor, part in zip(incoming, received.split(sizes[0]), strict=True):
            tensor.copy_(part.view(tensor.dtype))
