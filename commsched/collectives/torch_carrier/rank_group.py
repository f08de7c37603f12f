"""The torch carrier's three primitives, reduce, broadcast and exchange: over gloo for CPUs, NCCL for GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions
from torch.distributed import ReduceOp as C10dOp

from commsched.collectives.carrier import ReduceOp

_C10D: dict[ReduceOp, Any] = {
    ReduceOp.AVERAGE: C10dOp.SUM,
    ReduceOp.SUM: C10dOp.SUM,
    ReduceOp.MIN: C10dOp.MIN,
    ReduceOp.MAX: C10dOp.MAX,
    ReduceOp.PRODUCT: C10dOp.PRODUCT,
}


class RankGroup(ABC):
    """The ranks of one process set, numbered from 0. All ranks call in the same order, with flat tensors."""

    rank: int
    size: int

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Combine `tensor` over all ranks, in place; an average is left undivided."""
        if self.size > 1 and tensor.numel():
            options = AllreduceOptions()
            options.reduceOp = _C10D[op]
            self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with rank `root`'s."""
        if self.size > 1 and tensor.numel():
            options = BroadcastOptions()
            options.rootRank = root
            self._group.broadcast([tensor.view(torch.uint8)], options).wait()

    @abstractmethod
    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to rank i and receive ``incoming[i]`` from it; sizes may differ and be 0."""

    def abort(self) -> None:
        """Close the connections; waiting collectives raise an error."""
        with suppress(AttributeError, RuntimeError):  # before torch 2.8 gloo groups have no abort
            self._group.abort()


class GlooGroup(RankGroup):
    """CPU tensors over gloo."""

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        # Point to point fills both directions of a TCP link; gloo's own all-to-all does not.
        # Receives first: gloo announces a receive on the connection that carries the other direction's data.
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self._group.recv([incoming[p]], p, 0) for p in reversed(peers) if incoming[p].numel()]
        works += [self._group.send([outgoing[p]], p, 0) for p in peers if outgoing[p].numel()]
        incoming[self.rank].copy_(outgoing[self.rank])
        for work in works:
            work.wait()


class NcclGroup(RankGroup):
    """GPU tensors over NCCL, each rank on a GPU of its own."""

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        # NCCL deadlocks unless sends and receives are one group of calls, as they are in its all-to-all.
        packed = torch.cat([tensor.view(torch.uint8) for tensor in outgoing])
        received = packed.new_empty(sum(tensor.nbytes for tensor in incoming))
        sizes = [[tensor.nbytes for tensor in side] for side in (incoming, outgoing)]
        self._group.alltoall_base(received, packed, *sizes).wait()
        for tensor, part in zip(incoming, received.split(sizes[0]), strict=True):
            tensor.copy_(part.view(tensor.dtype))
