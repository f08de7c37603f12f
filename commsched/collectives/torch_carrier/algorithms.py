"""Whole collectives built from the three primitives of ``RankGroup``, in the calling thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier.rank_group import RankGroup, combined

# NCCL can not add up the types on the left: they travel as the wider ones.
_WIDER = {torch.int16: torch.int32}


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied as doubles and truncated, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def _finish_(tensor: torch.Tensor, reduction: Reduction, size: int) -> None:
    if reduction.op is ReduceOp.AVERAGE:
        tensor.div_(size, rounding_mode=None if tensor.dtype.is_floating_point else "trunc")
    scale_(tensor, reduction.postscale)


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
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs]).to(_WIDER.get(dtype, dtype))
    scale_(flat, reduction.prescale)
    group.reduce(flat, reduction.op)
    _finish_(flat, reduction, group.size)
    if flat.data_ptr() != outputs[0].data_ptr():
        for target, part in zip(outputs, flat.split([t.numel() for t in outputs]), strict=True):
            target.copy_(part.view_as(target))


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
    scaled = tensor.clone()
    scale_(scaled, reduction.prescale)
    parts = [part.reshape(-1) for part in scaled.split(rows)]
    arrived = [torch.empty_like(parts[group.rank]) for _ in parts]
    group.exchange(parts, arrived)
    total = combined(arrived, reduction.op)
    _finish_(total, reduction, group.size)
    return total.view(rows[group.rank], *tensor.shape[1:])


def share_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` ranks gets: the first ones one more where they are uneven."""
    return [rows // size + (1 if rank < rows % size else 0) for rank in range(size)]
