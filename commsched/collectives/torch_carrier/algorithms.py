"""How the torch carrier computes each collective.

A ``RankGroup`` has three primitives: over a channel of messages for CPUs, over NCCL for GPUs. ``allreduce``
and the other functions build whole collectives from them, in the calling thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions
from torch.distributed import ReduceOp as C10dOp

from comm_core import MessageChannel
from commsched.collectives.carrier import ReduceOp, Reduction

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


# -- whole collectives ---------------------------------------------------------------------------------------


# The types on the left travel as the wider ones: NCCL cannot add up the first, sums for means of the others
# do not fit.
_WIDER = {torch.int16: torch.int32, torch.int8: torch.int32, torch.uint8: torch.int32}


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied as doubles and truncated, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def _finish_(tensor: torch.Tensor, reduction: Reduction, size: int) -> None:
    whole, factor = not tensor.dtype.is_floating_point, reduction.postscale
    if reduction.op is ReduceOp.AVERAGE and whole and factor != 1.0:
        factor /= size  # as in Horovod: truncated once
    elif reduction.op is ReduceOp.AVERAGE:
        tensor.div_(size, rounding_mode="trunc" if whole else None)
    scale_(tensor, factor)


def allreduce(
    group: RankGroup, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """Combine each input over all ranks into its output (which may be the input), one message per type."""
    if reduction.op is ReduceOp.ADASUM:
        for source, target in zip(inputs, outputs, strict=True):
            target.copy_(_adasum(group, source.reshape(-1), reduction).view_as(target))
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype is dtype]
        _allreduce_one_type(group, [inputs[i] for i in chosen], [outputs[i] for i in chosen], reduction)


def _allreduce_one_type(
    group: RankGroup, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    dtype = inputs[0].dtype
    if len(inputs) == 1 and dtype not in _WIDER:
        flat = outputs[0].view(-1)
        flat.copy_(inputs[0].view(-1))
    else:
        flat = torch.cat([_flat(tensor) for tensor in inputs]).to(_WIDER.get(dtype, dtype))
    scale_(flat, reduction.prescale)
    group.reduce(flat, reduction.op)
    _finish_(flat, reduction, group.size)
    if flat.data_ptr() != outputs[0].data_ptr():
        targets = [_flat(target) for target in outputs]
        torch._foreach_copy_(targets, flat.split([target.numel() for target in targets]))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _adasum(group: RankGroup, flat: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Combine ranks in pairs, then pairs in pairs; each step adds two vectors, a common direction once."""
    mine = flat.clone()
    scale_(mine, reduction.prescale)
    distance = 1
    while distance < group.size:
        peer = group.rank ^ distance
        theirs = torch.empty_like(mine)
        nothing = mine.new_empty(0)
        group.exchange(
            [mine if r == peer else nothing for r in range(group.size)],
            [theirs if r == peer else nothing for r in range(group.size)],
        )
        low, high = (mine, theirs) if group.rank < peer else (theirs, mine)
        mine = _adasum_pair(low, high)
        distance *= 2
    scale_(mine, reduction.postscale)
    return mine


def _adasum_pair(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    a, b = low.double(), high.double()
    dot, norm_a, norm_b = (torch.dot(x, y).item() for x, y in ((a, b), (a, a), (b, b)))
    weight_a = 1.0 - dot / (2.0 * norm_a) if norm_a else 1.0
    weight_b = 1.0 - dot / (2.0 * norm_b) if norm_b else 1.0
    return (a * weight_a + b * weight_b).to(low.dtype)


def broadcast(group: RankGroup, source: torch.Tensor, target: torch.Tensor, root: int) -> None:
    """Copy rank `root`'s source into every rank's target."""
    if group.rank == root:
        target.copy_(source)
    group.broadcast(target.view(-1), root)


def allgather(group: RankGroup, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Concatenate the tensors of all ranks; rank i's has ``rows[i]`` rows."""
    gathered = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    flat = tensor.reshape(-1)
    group.exchange([flat] * group.size, [part.view(-1) for part in gathered.split(list(rows))])
    return gathered


def alltoall(
    group: RankGroup, tensor: torch.Tensor, splits: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """Send ``splits[i][j]`` rows from rank i to rank j; return the received rows and their number by rank."""
    received = [row[group.rank] for row in splits]
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    group.exchange(
        [part.reshape(-1) for part in tensor.split(list(splits[group.rank]))],
        [part.view(-1) for part in result.split(received)],
    )
    return result, received


def reducescatter(group: RankGroup, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return this rank's share of the combined tensor's rows (see ``share_rows``)."""
    rows = share_rows(tensor.shape[0], group.size)
    wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype), copy=True)
    scale_(wide, reduction.prescale)
    parts = [part.reshape(-1) for part in wide.split(rows)]
    arrived = [torch.empty_like(parts[group.rank]) for _ in parts]
    group.exchange(parts, arrived)
    total = combined(arrived, reduction.op)
    _finish_(total, reduction, group.size)
    return total.to(tensor.dtype).view(rows[group.rank], *tensor.shape[1:])


def share_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` ranks gets: the first ones one more where they are uneven."""
    return [rows // size + (1 if rank < rows % size else 0) for rank in range(size)]
