"""The collectives of the torch engine, built from the three primitives of ``wires.py``. Synchronous; no names
here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier.rank_group import Wires

_HOW = {
    ReduceOp.AVERAGE: "sum",
    ReduceOp.SUM: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
# Types that the wires can not add up travel as a wider one.
_WIDER = {torch.int16: torch.int32}


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; whole numbers are multiplied as doubles and cut off, as Horovod does."""
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
    wires: Wires, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """Combine each input over all ranks into its output (which may be the input); one message per data
    type."""
    if reduction.op is ReduceOp.ADASUM:
        for source, target in zip(inputs, outputs, strict=True):
            target.copy_(_adasum(wires, source.reshape(-1), reduction).view_as(target))
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype is dtype]
        _allreduce_one_type(wires, [inputs[i] for i in chosen], [outputs[i] for i in chosen], reduction)


def _allreduce_one_type(
    wires: Wires, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    dtype = inputs[0].dtype
    if len(inputs) == 1 and dtype not in _WIDER:
        flat = outputs[0].view(-1)
        flat.copy_(inputs[0].view(-1))
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs]).to(_WIDER.get(dtype, dtype))
    scale_(flat, reduction.prescale)
    wires.reduce(flat, _HOW[reduction.op])
    _finish_(flat, reduction, wires.size)
    if flat.data_ptr() != outputs[0].data_ptr():
        for target, part in zip(outputs, flat.split([t.numel() for t in outputs]), strict=True):
            target.copy_(part.view_as(target))


def _adasum(wires: Wires, flat: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Pairs of ranks, then pairs of pairs: each step adds two vectors with their common direction counted
    once."""
    mine = flat.clone()
    scale_(mine, reduction.prescale)
    distance = 1
    while distance < wires.size:
        peer = wires.rank ^ distance
        theirs = torch.empty_like(mine)
        nothing = mine.new_empty(0)
        wires.exchange(
            [mine if r == peer else nothing for r in range(wires.size)],
            [theirs if r == peer else nothing for r in range(wires.size)],
        )
        low, high = (mine, theirs) if wires.rank < peer else (theirs, mine)
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


def broadcast(wires: Wires, source: torch.Tensor, target: torch.Tensor, root: int) -> None:
    """Rank `root`'s source into every rank's target."""
    if wires.rank == root:
        target.copy_(source)
    wires.broadcast(target.view(-1), root)


def allgather(wires: Wires, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The tensors of all ranks one below the other; rank i has ``rows[i]`` of them."""
    gathered = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    flat = tensor.reshape(-1)
    wires.exchange([flat] * wires.size, [part.view(-1) for part in gathered.split(list(rows))])
    return gathered


def alltoall(
    wires: Wires, tensor: torch.Tensor, splits: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """``splits[i][j]`` rows go from rank i to rank j; what came in, and how much of it from whom."""
    received = [row[wires.rank] for row in splits]
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    wires.exchange(
        [part.reshape(-1) for part in tensor.split(list(splits[wires.rank]))],
        [part.view(-1) for part in result.split(received)],
    )
    return result, received


def reducescatter(wires: Wires, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The combined tensor's rows, divided as evenly as possible; the first ranks have one more where it is
    uneven."""
    rows = share_rows(tensor.shape[0], wires.size)
    scaled = tensor.clone()
    scale_(scaled, reduction.prescale)
    parts = [part.reshape(-1) for part in scaled.split(rows)]
    arrived = [torch.empty_like(parts[wires.rank]) for _ in parts]
    wires.exchange(parts, arrived)
    total, combine = arrived[0], _COMBINE[_HOW[reduction.op]]
    for part in arrived[1:]:  # always in rank order, so that every run gives the same bits
        total = combine(total, part)
    _finish_(total, reduction, wires.size)
    return total.view(rows[wires.rank], *tensor.shape[1:])


def share_rows(rows: int, size: int) -> list[int]:
    """How many of `rows` each of `size` ranks gets."""
    return [rows // size + (1 if rank < rows % size else 0) for rank in range(size)]
