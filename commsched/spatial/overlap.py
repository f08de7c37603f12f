"""Compute the interior while halos are in flight, then the border strips; the backward sends border gradients
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from commsched.spatial.fetch import add_arrived, ask, boxes_of, delivered, own_contributions, return_to_owners
from commsched.spatial.intervals import Interval, Window
from commsched.spatial.linear import apply
from commsched.spatial.mesh import Mesh
from commsched.spatial.plan import Plan, Slices
from commsched.transport.channel import Parcel, Pending

Region = dict[int, Interval]  # per dimension


@dataclass
class Halo:
    """One fetch in progress, and later the exchange of its gradients."""

    plan: Plan
    mesh: Mesh
    fill: float
    module: str
    recvs: list[Parcel] = field(default_factory=list)
    pending: Pending | None = None
    returning: tuple[list[Parcel], Pending | None] | None = None
    own: list[tuple[Slices, Tensor]] = field(default_factory=list)


class Enter(Function):
    """Sends the pixels that others need. Its backward runs last and adds the received border gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        halo.recvs, halo.pending = ask(x, halo.plan, halo.mesh, halo.module)
        if halo.pending is not None:
            halo.pending.watch()
        return x.view_as(x)

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


def _summed(grads: tuple[Tensor, ...], boxes: tuple[Slices, ...], plan: Plan) -> Tensor:
    """Sum the gradients of the boxes into the gradient of the whole buffer."""
    total: Any = 0
    for grad, box in zip(grads, boxes):
        pads = [0] * (2 * grad.ndim)
        for dim, (lo, hi), length in zip(plan.dims, box, plan.wanted):
            pads[2 * (-1 - dim)], pads[2 * (-1 - dim) + 1] = lo, length - hi
        total = total + F.pad(grad, pads)
    result: Tensor = total
    return result


class Join(Function):
    """One tensor from its parts."""

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
        found = []
        for dim in dims:
            origin = self.windows[dim].need(*self.outputs[dim])[0]
            lo, hi = self.windows[dim].need(*strip[dim])
            found.append((lo - origin, hi - origin))
        return tuple(found)

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
    result: Tensor = Join.apply(tuple(shape), places, *parts)
    return result
