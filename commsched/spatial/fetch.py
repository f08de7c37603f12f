"""Run an exchange plan and its transpose as linear functions."""

from __future__ import annotations

import torch
from torch import Tensor

from commsched.spatial.linear import TRANSPOSED, apply
from commsched.spatial.mesh import Mesh
from commsched.spatial.plan import Piece, Plan, Slices
from commsched.transport.channel import Parcel, Pending


def fetch(
    x: Tensor, plan: Plan, mesh: Mesh, fill: float = 0.0, received: list[Tensor] | None = None
) -> Tensor:
    """Fetch the pixels this rank wants into one buffer, ``fill`` beyond the border; keeps messages in
    ``received``.
    """
    if not plan.remote and plan.plain:
        return _box(x, plan.dims, plan.own[0].src)
    return apply(fetched, x, plan, mesh, mesh.module, fill, received)


def fetched(
    x: Tensor, plan: Plan, mesh: Mesh, module: str, fill: float = 0.0, received: list[Tensor] | None = None
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


def ask(x: Tensor, plan: Plan, mesh: Mesh, module: str) -> tuple[list[Parcel], Pending | None]:
    """Start the messages of a fetch and return the pending receives."""
    sends = [(peer, pack(x, plan.dims, [(p.src, ()) for p in pieces])) for peer, pieces in plan.sends]
    recvs = [(peer, buffer_for(x, plan, pieces)) for peer, pieces in plan.recvs]
    return recvs, _start(mesh, plan, sends, recvs, module, "fetch")


def own_pixels(x: Tensor, plan: Plan, fill: float) -> Tensor:
    """A buffer with the pixels that this rank already holds."""
    shape = _with_lengths(x.shape, plan.dims, plan.wanted)
    out = x.new_full(shape, fill) if plan.filled else x.new_empty(shape)
    for piece in plan.own:
        _box(out, plan.dims, piece.dst).copy_(_flip(_box(x, plan.dims, piece.src), plan.dims, piece.flips))
    return out


def place(out: Tensor, plan: Plan, buffers: list[Tensor]) -> Tensor:
    """Copy received pixels to their places in the buffer."""
    for buffer, (_, pieces) in zip(buffers, plan.recvs):
        for piece, part in zip(pieces, unpack(buffer, out, plan, pieces)):
            _box(out, plan.dims, piece.dst).copy_(_flip(part, plan.dims, piece.flips))
    return out


def delivered(grad: Tensor, plan: Plan, mesh: Mesh, module: str) -> Tensor:
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
    mesh: Mesh, plan: Plan, sends: list[Parcel], recvs: list[Parcel], module: str, what: str
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


def buffer_for(like: Tensor, plan: Plan, pieces: tuple[Piece, ...]) -> Tensor:
    return like.new_empty(sum(_shape(like, plan, piece).numel() for piece in pieces))


def _shape(like: Tensor, plan: Plan, piece: Piece) -> torch.Size:
    return torch.Size(_with_lengths(like.shape, plan.dims, piece.shape))


def unpack(buffer: Tensor, like: Tensor, plan: Plan, pieces: tuple[Piece, ...]) -> list[Tensor]:
    shapes = [_shape(like, plan, piece) for piece in pieces]
    return [part.view(shape) for part, shape in zip(buffer.split([s.numel() for s in shapes]), shapes)]


def _meet(box: Slices, piece: Piece) -> tuple[Slices, Slices] | None:
    """The overlap of ``piece`` and ``box`` (both in the wanted buffer), relative to each of them."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, piece.dst)]
    if any(lo >= hi for lo, hi in both):
        return None
    in_piece = tuple((lo - dst[0], hi - dst[0]) for (lo, hi), dst in zip(both, piece.dst))
    return in_piece, tuple((lo - start[0], hi - start[0]) for (lo, hi), start in zip(both, box))


def boxes_of(x: Tensor, plan: Plan, fill: float, buffers: list[Tensor], box: Slices) -> Tensor:
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
    parts: list[tuple[Slices, Tensor]], plan: Plan, mesh: Mesh, module: str
) -> tuple[list[Parcel], Pending | None]:
    """Start sending the gradients of boxes back to their owners and return the pending receives."""
    like = parts[0][1]
    sends = [(peer, torch.cat([_piece_sum(parts, plan, p) for p in pieces])) for peer, pieces in plan.recvs]
    recvs = [(peer, buffer_for(like, plan, pieces)) for peer, pieces in plan.sends]
    return recvs, _start(mesh, plan, sends, recvs, module, "gradient of fetch")


def _piece_sum(parts: list[tuple[Slices, Tensor]], plan: Plan, piece: Piece) -> Tensor:
    like = parts[0][1]
    total = like.new_zeros(_shape(like, plan, piece))
    for box, grad in parts:
        if (met := _meet(box, piece)) is not None:
            _box(total, plan.dims, met[0]).add_(_box(grad, plan.dims, met[1]))
    return total.reshape(-1)


def own_contributions(parts: list[tuple[Slices, Tensor]], plan: Plan) -> list[tuple[Slices, Tensor]]:
    """Gradient contributions of the boxes to this rank's own pixels, with their places in the tile."""
    found = []
    for piece in plan.own:
        for box, grad in parts:
            if (met := _meet(box, piece)) is not None:
                where = tuple((lo + src[0], hi + src[0]) for (lo, hi), src in zip(met[0], piece.src))
                found.append((where, _box(grad, plan.dims, met[1])))
    return found


def add_arrived(total: Tensor, plan: Plan, own: list[tuple[Slices, Tensor]], recvs: list[Parcel]) -> Tensor:
    """Own contributions, then those of other ranks in rank order."""
    for where, grad in own:
        _box(total, plan.dims, where).add_(grad)
    for (_, buffer), (_, pieces) in zip(recvs, plan.sends):
        for piece, part in zip(pieces, unpack(buffer, total, plan, pieces)):
            _box(total, plan.dims, piece.src).add_(part)
    return total


def assembled(x: Tensor, plan: Plan, mesh: Mesh, module: str) -> Tensor:
    """All tiles on every rank. All ranks compute the same with it, so each takes its own slice of the
    gradient.
    """
    return fetched(x, plan, mesh, module)


def _sliced(whole: Tensor, plan: Plan, mesh: Mesh, module: str) -> Tensor:
    """This rank's part of a replicated value."""
    part = whole.new_zeros(_with_lengths(whole.shape, plan.dims, plan.held))
    for piece in plan.own:
        _box(part, plan.dims, piece.src).copy_(_box(whole, plan.dims, piece.dst))
    return part


TRANSPOSED.update({fetched: delivered, delivered: fetched, assembled: _sliced, _sliced: assembled})
