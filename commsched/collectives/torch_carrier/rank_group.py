"""The torch carrier's three primitives: over a channel of messages for CPUs, over NCCL for GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions
from torch.distributed import ReduceOp as C10dOp

from comm_core import MessageChannel
from commsched.collectives.carrier import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.AVERAGE: torch.add,  # its callers divide
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def combined(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Combine the ranks' parts in rank order, into the first one, and return it."""
    for other in parts[1:]:
        _COMBINE[op](parts[0], other, out=parts[0])
    return parts[0]


class RankGroup(ABC):
    """The ranks of one process set, numbered from 0. All ranks call in the same order, with flat tensors."""

    rank: int
    size: int

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Combine `tensor` over all ranks, in place; an average is left undivided."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with rank `root`'s."""

    @abstractmethod
    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to rank i and receive ``incoming[i]`` from it; sizes may differ and be 0."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End every wait with an error, now and later; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give the connections back."""


class ChannelGroup(RankGroup):
    """CPU tensors over a channel of messages.

    A short tensor goes whole to every rank: a rank waits for one message of each other. A long one goes in
    two exchanges of shares, so that no rank sends more than twice its bytes. Every rank gets the same bits in
    every run: sums are made in rank order, by all ranks alike or a share by one rank for all.
    """

    def __init__(self, channel: MessageChannel, rank: int, size: int) -> None:
        self._channel, self.rank, self.size = channel, rank, size

    def reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if self._is_short(tensor):
            arrived = tensor.new_empty((self.size, tensor.numel())).unbind()
            self.exchange([tensor] * self.size, arrived)
            tensor.copy_(combined(arrived, op))
            return
        shares = tensor.tensor_split(self.size)
        own = shares[self.rank]
        arrived = own.new_empty((self.size, own.numel())).unbind()
        self.exchange(shares, arrived)
        own.copy_(combined(arrived, op))
        self._move(self._others(), [own] * self.size, self._others(), shares)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        receivers = [rank for rank in range(self.size) if rank != root]
        to, source = (receivers, []) if self.rank == root else ([], [root])
        if self._is_short(tensor) or self.size == 2:
            self._move(to, [tensor] * self.size, source, [tensor] * self.size)
            return
        shares = tensor.tensor_split(self.size)
        own = [shares[self.rank]] * self.size
        self._move(to, shares, source, own)
        self._move(receivers, own, self._others() if source else [], shares)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        incoming[self.rank].copy_(outgoing[self.rank])
        self._move(self._others(), outgoing, self._others(), incoming)

    def _is_short(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes * (self.size - 1) <= MessageChannel.SHORT

    def _others(self) -> list[int]:
        """Return the other ranks, from the next one on, so that not all ranks send to rank 0 first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _move(
        self,
        to: Sequence[int],
        outgoing: Sequence[torch.Tensor],
        source: Sequence[int],
        incoming: Sequence[torch.Tensor],
    ) -> None:
        """Send ``outgoing[i]`` to each other rank i in `to`; receive ``incoming[i]`` of each in `source`."""
        sends, receives = (
            [(peer, [tensors[peer]]) for peer in peers if peer != self.rank and tensors[peer].numel()]
            for peers, tensors in ((to, outgoing), (source, incoming))
        )
        self._channel.exchange(sends, receives, 0, "collective").wait()

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()


_C10D: dict[ReduceOp, Any] = {
    ReduceOp.AVERAGE: C10dOp.SUM,
    ReduceOp.SUM: C10dOp.SUM,
    ReduceOp.MIN: C10dOp.MIN,
    ReduceOp.MAX: C10dOp.MAX,
    ReduceOp.PRODUCT: C10dOp.PRODUCT,
}


class NcclGroup(RankGroup):
    """GPU tensors over NCCL, each rank on a GPU of its own."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if self.size > 1 and tensor.numel():
            options = AllreduceOptions()
            options.reduceOp = _C10D[op]
            self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.size > 1 and tensor.numel():
            options = BroadcastOptions()
            options.rootRank = root
            self._group.broadcast([tensor.view(torch.uint8)], options).wait()

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        # NCCL deadlocks unless sends and receives are one group of calls, as they are in its all-to-all.
        packed = torch.cat([tensor.view(torch.uint8) for tensor in outgoing])
        received = packed.new_empty(sum(tensor.nbytes for tensor in incoming))
        sizes = [[tensor.nbytes for tensor in side] for side in (incoming, outgoing)]
        self._group.alltoall_base(received, packed, *sizes).wait()
        for tensor, part in zip(incoming, received.split(sizes[0]), strict=True):
            tensor.copy_(part.view(tensor.dtype))

    def abort(self, reason: str) -> None:
        with suppress(AttributeError, RuntimeError):  # before torch 2.8 groups have no abort
            self._group.abort()

    def close(self) -> None:
        self._group = None
