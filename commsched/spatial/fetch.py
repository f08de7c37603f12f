"""Fetch pixels of other ranks.

An ``ExchangePlan`` says which rank sends which rectangles to which. ``fetched`` carries it out; its gradient
is ``delivered``, the same exchange backwards. ``overlapped`` computes while halos travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from commsched.channels import Complete, Parcel, Pending, total_bytes
from commsched.spatial.intervals import Fill, Interval, Run, Split, Want, Window, want_length
from commsched.spatial.mesh import TRANSPOSED, Mesh, apply, same

# -- exchange plans: which rank sends which rectangle to which -----------------------------------------------

# Computed from splits and wants alone, without communication, so all ranks get the same plan.

Slices = tuple[Interval, ...]


@dataclass(frozen=True)
class Dim:
    """One tensor dimension of a fetch, over all ranks.

    ``parts[r]`` is the part of ``split`` that rank ``r`` holds and ``wants[r]`` the pixels it asks for.
    """

    dim: int
    split: Split
    parts: tuple[int, ...]
    wants: tuple[Want, ...]


@dataclass(frozen=True)
class Rect:
    """Pixels at ``src`` in the sender's tile and at ``dst`` in the receiver's buffer, where they are mirrored
    along ``flips`` (indices into the plan's ``dims``).
    """

    src: Slices
    dst: Slices
    flips: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.src)


RectsByPeer = tuple[tuple[int, tuple[Rect, ...]], ...]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's share of a fetch. ``sends`` and ``recvs``: peers in rank order, each with its rectangles."""

    rank: int
    dims: tuple[int, ...]
    held: tuple[int, ...]  # lengths of this rank's tile along ``dims``
    wanted: tuple[int, ...]  # lengths of the buffer that it fetches
    own: tuple[Rect, ...]
    sends: RectsByPeer
    recvs: RectsByPeer
    filled: bool  # some pixels of the buffer come from no rank
    remote: bool  # on some rank, pixels come from another rank

    @property
    def plain(self) -> bool:
        """Whether the result is one unflipped rectangle of this rank's own tile."""
        one = len(self.own) == 1 and not self.own[0].flips and self.own[0].shape == self.wanted
        return one and not self.sends and not self.recvs


def _rects(have: Slices, origin: tuple[int, ...], wants: tuple[Want, ...]) -> Iterator[Rect]:
    """Yield the rectangles of ``wants`` that lie in the box ``have``; ``origin``: where the sender's tile
    begins.
    """
    for overlaps in product(*(list(_overlaps(box, want)) for box, want in zip(have, wants))):
        src = tuple((lo - start, hi - start) for ((lo, hi), _, _), start in zip(overlaps, origin))
        flips = tuple(i for i, (_, _, flip) in enumerate(overlaps) if flip)
        yield Rect(src, tuple(dst for _, dst, _ in overlaps), flips)


def _overlaps(have: Interval, want: Want) -> Iterator[tuple[Interval, Interval, bool]]:
    """Yield each overlap: its pixels, their place in the buffer, whether they are mirrored there."""
    position = 0
    for part in want:
        if isinstance(part, Run):
            lo, hi = max(have[0], part.lo), min(have[1], part.hi)
            if lo < hi:
                at = position + (part.hi - hi if part.flip else lo - part.lo)
                yield (lo, hi), (at, at + hi - lo), part.flip
        position += len(part)


def _have(axis: Dim, source: int, target: int) -> Interval:
    """The pixels that ``source`` sends to ``target``: all it holds along a dimension that both cut alike,
    else those that it owns and ``target`` does not hold.
    """
    part, other = axis.parts[source], axis.parts[target]
    if part == other:
        return axis.split.held(part)
    (lo, hi), held = axis.split.owned(part), axis.split.held(other)
    if held[0] == held[1]:
        return lo, hi
    return (max(lo, held[1]), hi) if part > other else (lo, min(hi, held[0]))


@lru_cache(maxsize=4096)
def make_plan(rank: int, dims: tuple[Dim, ...], groups: tuple[int, ...]) -> ExchangePlan:
    """The share of ``rank``. Only ranks with the same entry of ``groups`` exchange pixels."""
    origins = [tuple(axis.split.held(axis.parts[r])[0] for axis in dims) for r in range(len(groups))]

    def between(source: int, target: int) -> tuple[Rect, ...]:
        wants = tuple(axis.wants[target] for axis in dims)
        have = tuple(_have(axis, source, target) for axis in dims)
        return tuple(_rects(have, origins[source], wants))

    peers = [r for r, group in enumerate(groups) if group == groups[rank] and r != rank]
    return ExchangePlan(
        rank=rank,
        dims=tuple(axis.dim for axis in dims),
        held=tuple(hi - lo for lo, hi in (axis.split.held(axis.parts[rank]) for axis in dims)),
        wanted=tuple(want_length(axis.wants[rank]) for axis in dims),
        own=between(rank, rank),
        sends=tuple((peer, rects) for peer in peers if (rects := between(rank, peer))),
        recvs=tuple((peer, rects) for peer in peers if (rects := between(peer, rank))),
        filled=any(isinstance(part, Fill) for axis in dims for part in axis.wants[rank]),
        remote=not all(_covered(dims, target) for target in range(len(groups))),
    )


def _covered(dims: tuple[Dim, ...], target: int) -> bool:
    """Whether ``target`` already holds all it wants. An empty box wants nothing."""
    wants = [axis.wants[target] for axis in dims]
    if any(want_length(want) == 0 for want in wants):
        return True
    runs = ((axis.split.held(axis.parts[target]), part) for axis, want in zip(dims, wants) for part in want)
    return all(lo <= part.lo and part.hi <= hi for (lo, hi), part in runs if isinstance(part, Run))


# -- a plan and its transpose as linear functions ------------------------------------------------------------


def fetch(
    x: Tensor, plan: ExchangePlan, mesh: Mesh, fill: float = 0.0, received: list[Tensor] | None = None
) -> Tensor:
    """Fetch the pixels this rank wants into one buffer, ``fill`` beyond the border; keeps messages in
    ``received``.
    """
    if not plan.remote and plan.plain:
        return _box(x, plan.dims, plan.own[0].src)
    return apply(fetched, x, plan, mesh, mesh.module, fill, received)


def fetched(
    x: Tensor,
    plan: ExchangePlan,
    mesh: Mesh,
    module: str,
    fill: float = 0.0,
    received: list[Tensor] | None = None,
) -> Tensor:
    """Pixels from their owners."""
    recvs, pending = ask(x, plan, mesh, module)
    out = own_pixels(x, plan, fill)
    pending.wait()
    buffers = [buffer for _, buffer in recvs]
    if received is not None:
        received += buffers
    return place(out, plan, buffers)


def ask(x: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> tuple[list[Parcel], Pending]:
    """Start the messages of a fetch and return the pending receives."""
    sends = [
        (peer, torch.cat([_box(x, plan.dims, rect.src).reshape(-1) for rect in rects]))
        for peer, rects in plan.sends
    ]
    return _start(sends, plan.recvs, x, plan, mesh, module, "fetch")


def own_pixels(x: Tensor, plan: ExchangePlan, fill: float) -> Tensor:
    """A buffer with the pixels that this rank already holds."""
    shape = _with_lengths(x, plan.dims, plan.wanted)
    out = x.new_full(shape, fill) if plan.filled else x.new_empty(shape)
    for rect in plan.own:
        _box(out, plan.dims, rect.dst).copy_(_flip(_box(x, plan.dims, rect.src), plan.dims, rect.flips))
    return out


def place(out: Tensor, plan: ExchangePlan, buffers: list[Tensor]) -> Tensor:
    """Copy received pixels to their places in the buffer."""
    for buffer, (_, rects) in zip(buffers, plan.recvs):
        for rect, pixels in _unpack(buffer, out, plan, rects):
            _box(out, plan.dims, rect.dst).copy_(_flip(pixels, plan.dims, rect.flips))
    return out


def delivered(grad: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """Contributions back to the owners, who add them in rank order."""

    def at(rect: Rect) -> Tensor:
        return _flip(_box(grad, plan.dims, rect.dst), plan.dims, rect.flips)

    sends = [(peer, torch.cat([at(rect).reshape(-1) for rect in rects])) for peer, rects in plan.recvs]
    recvs, pending = _start(sends, plan.sends, grad, plan, mesh, module, "gradient of fetch")
    pending.wait()
    contributions = {plan.rank: [(rect, at(rect)) for rect in plan.own]}
    for (peer, buffer), (_, rects) in zip(recvs, plan.sends):
        contributions[peer] = _unpack(buffer, grad, plan, rects)
    total = grad.new_zeros(_with_lengths(grad, plan.dims, plan.held))
    for _, pairs in sorted(contributions.items()):
        for rect, part in pairs:
            _box(total, plan.dims, rect.src).add_(part)
    return total


def _start(
    sends: list[Parcel],
    coming: RectsByPeer,
    like: Tensor,
    plan: ExchangePlan,
    mesh: Mesh,
    module: str,
    what: str,
) -> tuple[list[Parcel], Pending]:
    """Start an exchange; return the buffers into which the rectangles ``coming`` arrive."""
    recvs = [
        (peer, like.new_empty(sum(_with_lengths(like, plan.dims, rect.shape).numel() for rect in rects)))
        for peer, rects in coming
    ]
    if not plan.remote:
        return recvs, Complete()
    mesh.count(module, total_bytes(sends))
    return recvs, mesh.channel.exchange(sends, recvs, f"{module}: {what}")


def _with_lengths(x: Tensor, dims: Iterable[int], lengths: Iterable[int]) -> torch.Size:
    """The shape of ``x``, but with these lengths."""
    shape = list(x.shape)
    for dim, length in zip(dims, lengths):
        shape[dim] = length
    return torch.Size(shape)


def _box(x: Tensor, dims: Iterable[int], slices: Iterable[Interval]) -> Tensor:
    for dim, (lo, hi) in zip(dims, slices):
        x = x.narrow(dim, lo, hi - lo)
    return x


def _flip(x: Tensor, dims: tuple[int, ...], flips: tuple[int, ...]) -> Tensor:
    return x.flip([dims[i] for i in flips]) if flips else x


def _unpack(
    buffer: Tensor, like: Tensor, plan: ExchangePlan, rects: tuple[Rect, ...]
) -> list[tuple[Rect, Tensor]]:
    """The rectangles of a message, each with its pixels."""
    shapes = [_with_lengths(like, plan.dims, rect.shape) for rect in rects]
    parts = buffer.split([shape.numel() for shape in shapes])
    return [(rect, part.view(shape)) for rect, part, shape in zip(rects, parts, shapes)]


def assembled(x: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """All tiles on every rank. All ranks compute the same with it, so each takes its own slice of the
    gradient.
    """
    return fetched(x, plan, mesh, module)


def _sliced(whole: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """This rank's part of a replicated value."""
    part = whole.new_zeros(_with_lengths(whole, plan.dims, plan.held))
    for rect in plan.own:
        _box(part, plan.dims, rect.src).copy_(_box(whole, plan.dims, rect.dst))
    return part


TRANSPOSED.update({fetched: delivered, delivered: fetched, assembled: _sliced, _sliced: assembled})


# -- the interior is computed while halos are in flight, then the border strips ------------------------------

# The backward goes the other way: ``Boxes`` sends the gradients of the strips, the interior's backward runs
# while they travel, and ``Enter`` adds those that have arrived.

Region = dict[int, Interval]  # per dimension


@dataclass
class Halo:
    """One fetch in progress, and later the exchange of its gradients."""

    plan: ExchangePlan
    mesh: Mesh
    fill: float
    module: str
    recvs: list[Parcel] = field(default_factory=list)
    pending: Pending = field(default_factory=Complete)
    returning: tuple[list[Parcel], Pending] | None = None
    own: list[tuple[Slices, Tensor]] = field(default_factory=list)  # gradients of this rank's own pixels


def _meet(box: Slices, rect: Rect) -> tuple[Slices, Slices] | None:
    """The overlap of ``rect`` and ``box`` (both in the wanted buffer), relative to each of them."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, rect.dst)]
    if any(lo >= hi for lo, hi in both):
        return None
    in_rect = tuple((lo - dst[0], hi - dst[0]) for (lo, hi), dst in zip(both, rect.dst))
    return in_rect, tuple((lo - start[0], hi - start[0]) for (lo, hi), start in zip(both, box))


class Enter(Function):
    """Sends the pixels that others need. Its backward runs last and adds the received border gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        halo.recvs, halo.pending = ask(x, halo.plan, halo.mesh, halo.module)
        halo.pending.watch()
        return same(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        halo: Halo = ctx.halo
        if halo.returning is None:
            return grad, None
        recvs, pending = halo.returning
        pending.wait()
        plan, total = halo.plan, grad.clone()
        for where, part in halo.own:
            _box(total, plan.dims, where).add_(part)
        for (_, buffer), (_, rects) in zip(recvs, plan.sends):  # in rank order
            for rect, part in _unpack(buffer, total, plan, rects):
                _box(total, plan.dims, rect.src).add_(part)
        halo.returning, halo.own = None, []
        return total, None


class Boxes(Function):
    """The inputs of the border strips, once the halo is here: boxes of the buffer that a fetch would have
    made. For plans without flips (windows have none).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, boxes: tuple[Slices, ...]) -> tuple[Tensor, ...]:
        ctx.halo, ctx.boxes, plan = halo, boxes, halo.plan
        halo.pending.wait()
        sources = [(rect, _box(x, plan.dims, rect.src)) for rect in plan.own]
        for (_, buffer), (_, rects) in zip(halo.recvs, plan.recvs):
            sources += _unpack(buffer, x, plan, rects)
        halo.recvs, halo.pending = [], Complete()
        inputs = []
        for box in boxes:
            out = x.new_full(_with_lengths(x, plan.dims, (hi - lo for lo, hi in box)), halo.fill)
            for rect, pixels in sources:
                if (met := _meet(box, rect)) is not None:
                    _box(out, plan.dims, met[1]).copy_(_box(pixels, plan.dims, met[0]))
            inputs.append(out)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        halo: Halo = ctx.halo
        plan, mesh, module = halo.plan, halo.mesh, halo.module
        if is_grad_enabled():  # create_graph=True: one differentiable exchange without overlap
            return apply(delivered, _summed(grads, ctx.boxes, plan), plan, mesh, module), None, None
        parts = list(zip(ctx.boxes, grads))
        sends = [
            (peer, torch.cat([_sum_in(rect, parts, plan) for rect in rects])) for peer, rects in plan.recvs
        ]
        halo.returning = _start(sends, plan.sends, grads[0], plan, mesh, module, "gradient of fetch")
        halo.returning[1].watch()
        halo.own = []
        for rect in plan.own:
            for box, grad in parts:
                if (met := _meet(box, rect)) is not None:
                    where = tuple((lo + src[0], hi + src[0]) for (lo, hi), src in zip(met[0], rect.src))
                    halo.own.append((where, _box(grad, plan.dims, met[1])))
        return None, None, None


def _sum_in(rect: Rect, parts: list[tuple[Slices, Tensor]], plan: ExchangePlan) -> Tensor:
    """Sum the gradients of the boxes in one rectangle, as a flat tensor."""
    like = parts[0][1]
    total = like.new_zeros(_with_lengths(like, plan.dims, rect.shape))
    for box, grad in parts:
        if (met := _meet(box, rect)) is not None:
            _box(total, plan.dims, met[0]).add_(_box(grad, plan.dims, met[1]))
    return total.reshape(-1)


def _summed(grads: tuple[Tensor, ...], boxes: tuple[Slices, ...], plan: ExchangePlan) -> Tensor:
    """Sum the gradients of the boxes into the gradient of the whole buffer."""
    total: Any = 0
    for grad, box in zip(grads, boxes):
        pads = [0] * (2 * grad.ndim)
        for dim, (lo, hi), length in zip(plan.dims, box, plan.wanted):
            pads[2 * (-1 - dim)], pads[2 * (-1 - dim) + 1] = lo, length - hi
        total = total + F.pad(grad, pads)
    return total


class Join(Function):
    """The output, from those of the interior and of the strips."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], places: tuple[Region, ...], *parts: Tensor) -> Tensor:
        ctx.places = places
        out = parts[0].new_empty(shape)
        for region, part in zip(places, parts):
            _box(out, region, region.values()).copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_box(grad, region, region.values()) for region in ctx.places)


def interior(window: Window, held: Interval, outputs: Interval) -> Interval:
    """The outputs whose windows lie within the rank's tile."""
    lo = -(-(held[0] + window.before) // window.stride)
    hi = (held[1] - window.span + window.before) // window.stride + 1
    lo, hi = min(max(lo, outputs[0]), outputs[1]), min(max(hi, outputs[0]), outputs[1])
    return (lo, hi) if lo < hi else (outputs[0], outputs[0])


def frame(outputs: Region, inner: Region) -> list[Region]:
    """``outputs`` without ``inner``, as strips: for each dimension before and after the inner part."""
    strips, rest = [], outputs
    for dim, (start, end) in outputs.items():
        lo, hi = inner[dim]
        strips += [{**rest, dim: (start, lo)}, {**rest, dim: (hi, end)}]
        rest = {**rest, dim: inner[dim]}
    return [strip for strip in strips if all(lo < hi for lo, hi in strip.values())]


@dataclass(frozen=True)
class Division:
    """An operation's outputs on this rank, divided into interior and strips, by dimension and in global
    positions."""

    windows: Mapping[int, Window]
    held: Region
    outputs: Region
    inner: Region

    @classmethod
    def of(cls, windows: Mapping[int, Window], held: Region, outputs: Region) -> Division | None:
        """The division, or None if the interior or the border strips are empty."""
        inner = {dim: interior(windows[dim], held[dim], outputs[dim]) for dim in outputs}
        if inner == outputs or any(lo == hi for lo, hi in inner.values()):
            return None
        return cls(windows, held, outputs, inner)

    def interior_pixels(self, local: Tensor) -> int:
        """Outputs of the interior over all samples, channels left out."""
        rest = local.numel() // max(prod(local.shape[dim] for dim in self.inner) * local.shape[1], 1)
        return rest * prod(hi - lo for lo, hi in self.inner.values())

    def inputs(self, outputs: Region) -> Region:
        """The pixels that these outputs read."""
        return {dim: self.windows[dim].need(*span) for dim, span in outputs.items()}


def _within(region: Region, outer: Region) -> Region:
    """The place of ``region`` relative to the beginning of ``outer``."""
    return {dim: (lo - outer[dim][0], hi - outer[dim][0]) for dim, (lo, hi) in region.items()}


def overlapped(x: Tensor, halo: Halo, division: Division, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """``compute`` on the interior while the halo travels, then on the strips."""
    outputs, inner, dims = division.outputs, division.inner, halo.plan.dims
    entered = Enter.apply(x, halo)
    read = _within(division.inputs(inner), division.held)
    parts = [compute(_box(entered, read, read.values()))]
    strips, buffer = frame(outputs, inner), division.inputs(outputs)
    reads = [_within(division.inputs(strip), buffer) for strip in strips]
    boxes = tuple(tuple(read[dim] for dim in dims) for read in reads)
    parts += [compute(box) for box in Boxes.apply(entered, halo, boxes)]
    shape = _with_lengths(parts[0], outputs, (hi - lo for lo, hi in outputs.values()))
    places = tuple(_within(region, outputs) for region in (inner, *strips))
    return Join.apply(tuple(shape), places, *parts)


# -- let autograd save a fetched buffer as the tile, which exists anyway, plus the pixels received -----------


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs has been changed in "
            f"place: it is at version {tensor._version}, expected {version}"
        )


def _hooks_decide() -> bool:
    """Whether hooks of the user decide what autograd keeps; torch 2.6 cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or bool(top(True))


def compact(
    buffer: Tensor, tile: Tensor, plan: ExchangePlan, fill: float, received: list[Tensor]
) -> AbstractContextManager[Any]:
    """Within this context autograd keeps ``buffer`` as a recipe; other tensors as they are.

    If saved-tensor hooks of the user are active (activation checkpointing, offloading), they apply instead.
    """
    if buffer is tile or not torch.is_grad_enabled() or _hooks_decide():
        return nullcontext()
    source, version = tile.detach(), tile._version
    address, shape = buffer.data_ptr(), buffer.shape  # not the buffer itself: autograd keeps these functions

    def rebuilt() -> Tensor:
        _check_version(source, version)
        return place(own_pixels(source, plan, fill), plan, received)

    def pack(tensor: Tensor) -> Any:
        if tensor.data_ptr() == address and tensor.shape == shape:
            return rebuilt
        return tensor.detach(), tensor._version

    def unpack(kept: Any) -> Tensor:
        if kept is rebuilt:
            return rebuilt()
        _check_version(*kept)
        return kept[0]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
