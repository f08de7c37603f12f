"""Fetch pixels of other ranks: the plan of an exchange, its run as a linear function, halos in flight."""

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

from commsched.channels import Parcel, Pending
from commsched.spatial.intervals import Fill, Interval, Run, Split, Want, Window, want_length
from commsched.spatial.mesh import TRANSPOSED, Mesh, apply

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
class Piece:
    """A rectangle: ``src`` in the sender's tile, ``dst`` in the receiver's buffer, read backwards along
    ``flips``."""

    src: Slices
    dst: Slices
    flips: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.src)

    @property
    def pixels(self) -> int:
        return prod(self.shape)


Exchange = tuple[tuple[int, tuple[Piece, ...]], ...]


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's share of a fetch. ``sends`` and ``recvs``: peers in rank order, each with its pieces."""

    rank: int
    dims: tuple[int, ...]
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    own: tuple[Piece, ...]
    sends: Exchange
    recvs: Exchange
    filled: bool
    remote: bool

    @property
    def plain(self) -> bool:
        """Whether the result is one unflipped rectangle of this rank's own tile."""
        one = len(self.own) == 1 and not self.own[0].flips and self.own[0].shape == self.wanted
        return one and not self.sends and not self.recvs

    def sent_pixels(self) -> int:
        return sum(piece.pixels for _, pieces in self.sends for piece in pieces)


def pieces(have: Slices, origin: tuple[int, ...], wants: tuple[Want, ...]) -> tuple[Piece, ...]:
    """Rectangles of ``wants`` that lie in the box ``have``; ``origin`` is where the sender's tile begins."""
    overlaps = (list(_overlaps(box, want)) for box, want in zip(have, wants))
    return tuple(_piece(combination, origin) for combination in product(*overlaps))


def _overlaps(have: Interval, want: Want) -> Iterator[tuple[Interval, Interval, bool]]:
    position = 0
    for part in want:
        if isinstance(part, Run):
            lo, hi = max(have[0], part.lo), min(have[1], part.hi)
            if lo < hi:
                at = position + (part.hi - hi if part.flip else lo - part.lo)
                yield (lo, hi), (at, at + hi - lo), part.flip
        position += len(part)


def _piece(combination: Iterable[tuple[Interval, Interval, bool]], origin: tuple[int, ...]) -> Piece:
    parts = list(combination)
    src = tuple((lo - start, hi - start) for ((lo, hi), _, _), start in zip(parts, origin))
    return Piece(
        src, tuple(dst for _, dst, _ in parts), tuple(i for i, (_, _, flip) in enumerate(parts) if flip)
    )


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

    def between(source: int, target: int) -> tuple[Piece, ...]:
        wants = tuple(axis.wants[target] for axis in dims)
        have = tuple(_have(axis, source, target) for axis in dims)
        return pieces(have, origins[source], wants)

    peers = [r for r, group in enumerate(groups) if group == groups[rank] and r != rank]
    sends = tuple((peer, found) for peer in peers if (found := between(rank, peer)))
    recvs = tuple((peer, found) for peer in peers if (found := between(peer, rank)))
    boxes = [axis.split.held(axis.parts[rank]) for axis in dims]
    wanted = tuple(want_length(axis.wants[rank]) for axis in dims)
    filled = any(isinstance(part, Fill) for axis in dims for part in axis.wants[rank])
    return ExchangePlan(
        rank=rank,
        dims=tuple(axis.dim for axis in dims),
        held=tuple(hi - lo for lo, hi in boxes),
        wanted=wanted,
        own=between(rank, rank),
        sends=sends,
        recvs=recvs,
        filled=filled,
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
    if pending is not None:
        pending.wait()
    buffers = [buffer for _, buffer in recvs]
    if received is not None:
        received += buffers
    return place(out, plan, buffers)


def ask(x: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> tuple[list[Parcel], Pending | None]:
    """Start the messages of a fetch and return the pending receives."""
    sends = [(peer, pack(x, plan.dims, [(p.src, ()) for p in pieces])) for peer, pieces in plan.sends]
    recvs = [(peer, buffer_for(x, plan, pieces)) for peer, pieces in plan.recvs]
    return recvs, _start(mesh, plan, sends, recvs, module, "fetch")


def own_pixels(x: Tensor, plan: ExchangePlan, fill: float) -> Tensor:
    """A buffer with the pixels that this rank already holds."""
    shape = _with_lengths(x.shape, plan.dims, plan.wanted)
    out = x.new_full(shape, fill) if plan.filled else x.new_empty(shape)
    for piece in plan.own:
        _box(out, plan.dims, piece.dst).copy_(_flip(_box(x, plan.dims, piece.src), plan.dims, piece.flips))
    return out


def place(out: Tensor, plan: ExchangePlan, buffers: list[Tensor]) -> Tensor:
    """Copy received pixels to their places in the buffer."""
    for buffer, (_, pieces) in zip(buffers, plan.recvs):
        for piece, part in zip(pieces, unpack(buffer, out, plan, pieces)):
            _box(out, plan.dims, piece.dst).copy_(_flip(part, plan.dims, piece.flips))
    return out


def delivered(grad: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """Contributions back to the owners, who add them in rank order."""
    total = grad.new_zeros(_with_lengths(grad.shape, plan.dims, plan.held))
    sends = [(peer, pack(grad, plan.dims, [(p.dst, p.flips) for p in pieces])) for peer, pieces in plan.recvs]
    recvs = [(peer, buffer_for(grad, plan, pieces)) for peer, pieces in plan.sends]
    pending = _start(mesh, plan, sends, recvs, module, "gradient of fetch")
    if pending is not None:
        pending.wait()
    mine = [(_flip(_box(grad, plan.dims, p.dst), plan.dims, p.flips), p) for p in plan.own]
    parts = {
        peer: list(zip(unpack(buffer, grad, plan, pieces), pieces))
        for (_, buffer), (peer, pieces) in zip(recvs, plan.sends)
    }
    for rank in sorted((*parts, plan.rank)):
        for part, piece in mine if rank == plan.rank else parts[rank]:
            _box(total, plan.dims, piece.src).add_(part)
    return total


def _start(
    mesh: Mesh, plan: ExchangePlan, sends: list[Parcel], recvs: list[Parcel], module: str, what: str
) -> Pending | None:
    if not plan.remote:
        return None
    mesh.count(module, sum(buffer.numel() * buffer.element_size() for _, buffer in sends))
    return mesh.channel.exchange(sends, recvs, f"{module}: {what}")


def _with_lengths(shape: torch.Size, dims: tuple[int, ...], lengths: tuple[int, ...]) -> list[int]:
    result = list(shape)
    for dim, length in zip(dims, lengths):
        result[dim] = length
    return result


def _box(x: Tensor, dims: tuple[int, ...], slices: Slices) -> Tensor:
    for dim, (lo, hi) in zip(dims, slices):
        x = x.narrow(dim, lo, hi - lo)
    return x


def _flip(x: Tensor, dims: tuple[int, ...], flips: tuple[int, ...]) -> Tensor:
    return x.flip([dims[i] for i in flips]) if flips else x


def pack(x: Tensor, dims: tuple[int, ...], boxes: list[tuple[Slices, tuple[int, ...]]]) -> Tensor:
    parts = [_flip(_box(x, dims, slices), dims, flips).reshape(-1) for slices, flips in boxes]
    return torch.cat(parts)


def buffer_for(like: Tensor, plan: ExchangePlan, pieces: tuple[Piece, ...]) -> Tensor:
    return like.new_empty(sum(_shape(like, plan, piece).numel() for piece in pieces))


def _shape(like: Tensor, plan: ExchangePlan, piece: Piece) -> torch.Size:
    return torch.Size(_with_lengths(like.shape, plan.dims, piece.shape))


def unpack(buffer: Tensor, like: Tensor, plan: ExchangePlan, pieces: tuple[Piece, ...]) -> list[Tensor]:
    shapes = [_shape(like, plan, piece) for piece in pieces]
    return [part.view(shape) for part, shape in zip(buffer.split([s.numel() for s in shapes]), shapes)]


def _meet(box: Slices, piece: Piece) -> tuple[Slices, Slices] | None:
    """The overlap of ``piece`` and ``box`` (both in the wanted buffer), relative to each of them."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, piece.dst)]
    if any(lo >= hi for lo, hi in both):
        return None
    in_piece = tuple((lo - dst[0], hi - dst[0]) for (lo, hi), dst in zip(both, piece.dst))
    return in_piece, tuple((lo - start[0], hi - start[0]) for (lo, hi), start in zip(both, box))


def boxes_of(x: Tensor, plan: ExchangePlan, fill: float, buffers: list[Tensor], box: Slices) -> Tensor:
    """The part ``box`` of the buffer that the whole fetch would make. For plans without flips (windows have
    none)."""
    out = x.new_full(_with_lengths(x.shape, plan.dims, tuple(hi - lo for lo, hi in box)), fill)
    sources = [(piece, _box(x, plan.dims, piece.src)) for piece in plan.own]
    for buffer, (_, pieces) in zip(buffers, plan.recvs):
        sources += zip(pieces, unpack(buffer, x, plan, pieces))
    for piece, pixels in sources:
        if (met := _meet(box, piece)) is not None:
            _box(out, plan.dims, met[1]).copy_(_box(pixels, plan.dims, met[0]))
    return out


def return_to_owners(
    parts: list[tuple[Slices, Tensor]], plan: ExchangePlan, mesh: Mesh, module: str
) -> tuple[list[Parcel], Pending | None]:
    """Start sending the gradients of boxes back to their owners and return the pending receives."""
    like = parts[0][1]
    sends = [(peer, torch.cat([_piece_sum(parts, plan, p) for p in pieces])) for peer, pieces in plan.recvs]
    recvs = [(peer, buffer_for(like, plan, pieces)) for peer, pieces in plan.sends]
    return recvs, _start(mesh, plan, sends, recvs, module, "gradient of fetch")


def _piece_sum(parts: list[tuple[Slices, Tensor]], plan: ExchangePlan, piece: Piece) -> Tensor:
    like = parts[0][1]
    total = like.new_zeros(_shape(like, plan, piece))
    for box, grad in parts:
        if (met := _meet(box, piece)) is not None:
            _box(total, plan.dims, met[0]).add_(_box(grad, plan.dims, met[1]))
    return total.reshape(-1)


def own_contributions(parts: list[tuple[Slices, Tensor]], plan: ExchangePlan) -> list[tuple[Slices, Tensor]]:
    """Gradient contributions of the boxes to this rank's own pixels, with their places in the tile."""
    contributions = []
    for piece in plan.own:
        for box, grad in parts:
            if (met := _meet(box, piece)) is not None:
                where = tuple((lo + src[0], hi + src[0]) for (lo, hi), src in zip(met[0], piece.src))
                contributions.append((where, _box(grad, plan.dims, met[1])))
    return contributions


def add_arrived(
    total: Tensor, plan: ExchangePlan, own: list[tuple[Slices, Tensor]], recvs: list[Parcel]
) -> Tensor:
    """Own contributions, then those of other ranks in rank order."""
    for where, grad in own:
        _box(total, plan.dims, where).add_(grad)
    for (_, buffer), (_, pieces) in zip(recvs, plan.sends):
        for piece, part in zip(pieces, unpack(buffer, total, plan, pieces)):
            _box(total, plan.dims, piece.src).add_(part)
    return total


def assembled(x: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """All tiles on every rank. All ranks compute the same with it, so each takes its own slice of the
    gradient.
    """
    return fetched(x, plan, mesh, module)


def _sliced(whole: Tensor, plan: ExchangePlan, mesh: Mesh, module: str) -> Tensor:
    """This rank's part of a replicated value."""
    part = whole.new_zeros(_with_lengths(whole.shape, plan.dims, plan.held))
    for piece in plan.own:
        _box(part, plan.dims, piece.src).copy_(_box(whole, plan.dims, piece.dst))
    return part


TRANSPOSED.update({fetched: delivered, delivered: fetched, assembled: _sliced, _sliced: assembled})


# -- the interior is computed while halos are in flight, then the border strips ------------------------------

# The backward sends border gradients first.

Region = dict[int, Interval]  # per dimension


@dataclass
class Halo:
    """One fetch in progress, and later the exchange of its gradients."""

    plan: ExchangePlan
    mesh: Mesh
    fill: float
    module: str
    recvs: list[Parcel] = field(default_factory=list)
    pending: Pending | None = None
    returning: tuple[list[Parcel], Pending | None] | None = None
    own: list[tuple[Slices, Tensor]] = field(default_factory=list)


def same(x: Tensor) -> Tensor:
    """The same memory as another tensor. ``x.view_as(x)`` gives a single sample in channels_last a stride for
    which torch 2.13 computes wrong gradients of a convolution's weight.
    """
    return x[...]


class Enter(Function):
    """Sends the pixels that others need. Its backward runs last and adds the received border gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        halo.recvs, halo.pending = ask(x, halo.plan, halo.mesh, halo.module)
        if halo.pending is not None:
            halo.pending.watch()
        return same(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        halo: Halo = ctx.halo
        if halo.returning is None:
            return grad, None
        recvs, pending = halo.returning
        if pending is not None:
            pending.wait()
        total = add_arrived(grad.clone(), halo.plan, halo.own, recvs)
        halo.returning, halo.own = None, []
        return total, None


class Boxes(Function):
    """The inputs of the border strips, once the halo is here: boxes of the buffer that a fetch would have
    made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, boxes: tuple[Slices, ...]) -> tuple[Tensor, ...]:
        ctx.halo, ctx.boxes = halo, boxes
        if halo.pending is not None:
            halo.pending.wait()
        buffers = [buffer for _, buffer in halo.recvs]
        halo.recvs, halo.pending = [], None
        return tuple(boxes_of(x, halo.plan, halo.fill, buffers, box) for box in boxes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        halo: Halo = ctx.halo
        if is_grad_enabled():  # create_graph=True: one differentiable exchange without overlap
            whole = _summed(grads, ctx.boxes, halo.plan)
            return apply(delivered, whole, halo.plan, halo.mesh, halo.module), None, None
        parts = list(zip(ctx.boxes, grads))
        halo.returning = return_to_owners(parts, halo.plan, halo.mesh, halo.module)
        if (pending := halo.returning[1]) is not None:
            pending.watch()
        halo.own = own_contributions(parts, halo.plan)
        return None, None, None


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
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], places: tuple[Region, ...], *parts: Tensor) -> Tensor:
        ctx.places = places
        out = parts[0].new_empty(shape)
        for region, part in zip(places, parts):
            _narrowed(out, region).copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_narrowed(grad, region) for region in ctx.places)


def _narrowed(x: Tensor, region: Region) -> Tensor:
    for dim, (lo, hi) in region.items():
        x = x.narrow(dim, lo, hi - lo)
    return x


def interior(window: Window, held: Interval, outputs: Interval) -> Interval:
    """The outputs whose windows lie within the rank's tile."""
    lo = -(-(held[0] + window.before) // window.stride)
    hi = (held[1] - window.span + window.before) // window.stride + 1
    lo, hi = min(max(lo, outputs[0]), outputs[1]), min(max(hi, outputs[0]), outputs[1])
    return (lo, hi) if lo < hi else (outputs[0], outputs[0])


def frame(outputs: Region, inner: Region) -> list[Region]:
    """``outputs`` without ``inner``, as strips: for each dimension before and after the inner part."""
    strips = []
    dims = list(outputs)
    for i, dim in enumerate(dims):
        fixed = {d: inner[d] if k < i else outputs[d] for k, d in enumerate(dims) if d != dim}
        for part in ((outputs[dim][0], inner[dim][0]), (inner[dim][1], outputs[dim][1])):
            strip = {d: part if d == dim else fixed[d] for d in dims}
            if all(lo < hi for lo, hi in strip.values()):
                strips.append(strip)
    return strips


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

    def interior_input(self) -> Region:
        """The pixels that the interior reads, relative to the rank's tile."""
        needs = {dim: self.windows[dim].need(*span) for dim, span in self.inner.items()}
        return {dim: (lo - self.held[dim][0], hi - self.held[dim][0]) for dim, (lo, hi) in needs.items()}

    def strip_input(self, strip: Region, dims: tuple[int, ...]) -> Slices:
        """The pixels that a strip reads, relative to the buffer of a fetch for all outputs."""
        slices = []
        for dim in dims:
            origin = self.windows[dim].need(*self.outputs[dim])[0]
            lo, hi = self.windows[dim].need(*strip[dim])
            slices.append((lo - origin, hi - origin))
        return tuple(slices)

    def place(self, region: Region) -> Region:
        return {
            dim: (lo - self.outputs[dim][0], hi - self.outputs[dim][0]) for dim, (lo, hi) in region.items()
        }


def overlapped(x: Tensor, halo: Halo, division: Division, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """``compute`` on the interior while the halo travels, then on the strips."""
    entered = Enter.apply(x, halo)
    parts = [compute(_narrowed(entered, division.interior_input()))]
    strips = frame(division.outputs, division.inner)
    boxes = tuple(division.strip_input(strip, halo.plan.dims) for strip in strips)
    parts += [compute(box) for box in Boxes.apply(entered, halo, boxes)]
    shape = list(parts[0].shape)
    for dim, (lo, hi) in division.outputs.items():
        shape[dim] = hi - lo
    places = tuple(division.place(region) for region in (division.inner, *strips))
    return Join.apply(tuple(shape), places, *parts)


# -- let autograd save a fetched buffer as the tile, which exists anyway, plus the pixels received -----------


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs has been changed in "
            f"place: it is at version {tensor._version}, expected {version}"
        )


def hooks_decide(unknown: bool) -> bool:
    """Whether hooks of the user decide what autograd keeps; ``unknown`` in torch 2.6, which cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return unknown if top is None else bool(top(True))


def compact(
    buffer: Tensor, tile: Tensor, plan: ExchangePlan, fill: float, received: list[Tensor]
) -> AbstractContextManager[Any]:
    """Within this context autograd keeps ``buffer`` as a recipe; other tensors as they are.

    If saved-tensor hooks of the user are active (activation checkpointing, offloading), they apply instead.
    """
    if buffer is tile or not torch.is_grad_enabled() or hooks_decide(unknown=True):
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
        if not callable(kept):
            _check_version(*kept)
        return kept() if callable(kept) else kept[0]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
