"""The memory of gradients: slots in flat buffers, and buckets as slices of them.

Each group (dtype and device) has one flat buffer. It holds the parameters in the order in which the buckets
name them, each contiguous, so that ``p.grad`` is a view even when a tensor is split over several buckets. A
bucket is a slice whose length is a multiple of the number of ranks: shard r of it belongs to rank r. Shards
are equally long, or as long as ``shares`` say. Where parameters have owners, a bucket holds the parameters of
rank 0, then those of rank 1 and so on. A bucket of rows has any length: row k of it belongs to rank k modulo
the ranks.

Of a tied weight the head's part of the gradient is sent before the whole gradient is there. Both have memory:
the part among the other gradients, where the sum will be, and the whole gradient in buckets of rows, of which
those that differ are summed anew (``corrections``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import lcm

import torch

from scheduler.ir.buckets import Bucket, Piece

# Elements. 64 bytes of fp32: kernels like aligned rows, and shards of aligned buckets stay aligned.
ALIGN = 16


@dataclass(slots=True)
class Slot:
    """The place of parameter ``param`` in its group's flat buffer."""

    param: int
    group: int
    offset: int
    numel: int
    buckets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slice:
    """One bucket: elements ``[start, stop)`` of its group's flat buffer, and the parameters in it."""

    number: int
    group: int
    start: int
    stop: int
    params: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # of each rank's shard, from ``start`` on; empty: all shards are equally long
    row: int = 0  # elements of a row, of which only touched ones travel; 0: all elements travel

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def shard(self, rank: int, size: int) -> tuple[int, int]:
        """Return the elements of the flat buffer that ``rank`` owns."""
        if self.ends:
            return self.start + (self.ends[rank - 1] if rank else 0), self.start + self.ends[rank]
        part = self.numel // size
        return self.start + rank * part, self.start + (rank + 1) * part


@dataclass(slots=True)
class Layout:
    """All slots (by parameter) and slices (by bucket), and the length of each group's buffer.

    ``corrections``: of tied weights the slots of the whole gradients. ``slots`` has those of their sums.
    """

    slots: dict[int, Slot]
    slices: list[Slice]
    lengths: dict[int, int]
    corrections: dict[int, Slot] = field(default_factory=dict)

    def corrected(self, bucket: int) -> int | None:
        """Return the parameter whose sum a bucket corrects; None for other buckets."""
        piece = self.slices[bucket]
        param = piece.params[0] if piece.row and piece.params else -1
        return param if param in self.corrections else None

    def empty(self) -> list[int]:
        """Return the buckets without elements.

        Cuts move to multiples of a length, so a bucket may take up all that a plan puts into the next one.
        """
        return [piece.number for piece in self.slices if not piece.params]


def build_layout(
    numels: Sequence[int],
    itemsizes: Sequence[int],
    buckets: Sequence[Bucket],
    ranks: int,
    owners: Sequence[int] | None = None,
    rows: Mapping[int, int] | None = None,
    alignment: Mapping[int, int] | None = None,
    heads: Mapping[int, int] | None = None,
    shares: Sequence[int] = (),
) -> Layout:
    """Return slots and slices for buckets whose pieces name parameters by index and bytes.

    A cut inside a tensor moves to where the bucket's length is a multiple of the ranks, because padding would
    tear the tensor apart. With ``owners`` (ranks by parameter), no tensor may be cut. ``rows`` has the
    elements of a row of each parameter that travels by rows, which is alone in its group and is cut between
    rows. Tensors and shards start at multiples of ``ALIGN`` elements, or of the group's ``alignment``.
    ``heads`` has the parameter of each tensor that is a tied weight's part. Parameters without elements have
    no slot. ``shares``: of each rank, how long its shard is in relation to the others; empty: as long.
    """
    layout = Layout({}, [Slice(number, bucket.group, 0, 0) for number, bucket in enumerate(buckets)], {})
    numbered = sorted(enumerate(buckets), key=lambda item: item[1].group)
    for group, grouped in groupby(numbered, key=lambda item: item[1].group):
        members = list(grouped)
        first = members[0][1].pieces[0].layer
        align = (alignment or {}).get(group, ALIGN)
        if rows and first in rows:
            _lay_out_rows(layout, group, members, numels[first], itemsizes[first], rows[first])
        elif owners is None:
            _lay_out_group(layout, group, members, numels, itemsizes, ranks, align, shares)
        else:
            _check_whole(buckets, numels, itemsizes)
            _lay_out_owned(layout, group, members, numels, owners, ranks, align)
    for head, param in (heads or {}).items():
        if head in layout.slots:
            _join_head(layout, head, param)
    return layout


def _join_head(layout: Layout, head: int, param: int) -> None:
    """Let a tied weight's sum be where its head's part is, complete when all buckets of both have arrived."""
    part, whole = layout.slots.pop(head), layout.slots[param]
    for number in part.buckets:
        piece = layout.slices[number]
        piece.params = tuple(param if i == head else i for i in piece.params)
    layout.corrections[param] = whole
    layout.slots[param] = Slot(param, part.group, part.offset, part.numel, [*part.buckets, *whole.buckets])


def _lay_out_rows(
    layout: Layout, group: int, buckets: list[tuple[int, Bucket]], numel: int, itemsize: int, row: int
) -> None:
    """Lay out the one parameter of a group of rows. Buckets need no padding: ranks own rows, not parts."""
    for number, bucket in buckets:
        start, stop = bucket.pieces[0].start // itemsize, bucket.pieces[-1].stop // itemsize
        layout.slices[number] = Slice(number, group, start, stop, row=row)
    param = buckets[0][1].pieces[0].layer
    layout.slots[param] = Slot(param, group, 0, numel)
    layout.lengths[group] = numel
    _register(layout, group)


def _check_whole(buckets: Sequence[Bucket], numels: Sequence[int], itemsizes: Sequence[int]) -> None:
    for number, bucket in enumerate(buckets):
        for piece in bucket.pieces:
            if piece.bytes != numels[piece.layer] * itemsizes[piece.layer]:
                size = numels[piece.layer] * itemsizes[piece.layer]
                raise ValueError(
                    f"bucket {number} holds bytes {piece.start}..{piece.stop} of the {size} of tensor"
                    f" {piece.layer}; this optimizer updates whole tensors, so pass a program that cuts none"
                )


def _lay_out_owned(
    layout: Layout,
    group: int,
    buckets: list[tuple[int, Bucket]],
    numels: Sequence[int],
    owners: Sequence[int],
    ranks: int,
    align: int,
) -> None:
    start = 0
    for number, bucket in buckets:
        cursor, ends = start, []
        for rank in range(ranks):
            for i in (piece.layer for piece in bucket.pieces if owners[piece.layer] == rank):
                layout.slots[i] = Slot(i, group, cursor, numels[i])
                cursor += _round_up(numels[i], align)
            ends.append(cursor - start)
        layout.slices[number] = Slice(number, group, start, cursor, ends=tuple(ends))
        start = cursor
    layout.lengths[group] = start
    _register(layout, group)


def _lay_out_group(
    layout: Layout,
    group: int,
    buckets: list[tuple[int, Bucket]],
    numels: Sequence[int],
    itemsizes: Sequence[int],
    ranks: int,
    align: int,
    shares: Sequence[int],
) -> None:
    unit = ranks * align
    start = 0
    for position, (number, bucket) in enumerate(buckets):
        cursor = start
        for piece in bucket.pieces:
            cursor = _place(layout, group, piece, cursor, numels[piece.layer], itemsizes[piece.layer], align)
        cut = bucket.pieces[-1]
        slot = layout.slots[cut.layer]
        open_ended = cut.stop < numels[cut.layer] * itemsizes[cut.layer]
        if open_ended:
            _check_continues(buckets, position, cut)
            end = slot.offset + slot.numel
            # The start itself may have moved beyond this cut; then the bucket gets the smallest length.
            stop = min(start + max(1, (cursor - start) // unit) * unit, start + _round_up(end - start, unit))
        else:
            stop = start + _round_up(cursor - start, unit)
        layout.slices[number] = Slice(number, group, start, stop, ends=ends_of(stop - start, shares, align))
        start = stop
    layout.lengths[group] = start
    _register(layout, group)


def shares_by_host(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return shares with which the ranks of each host own as much of a bucket as those of any other host.

    ``hosts``: of each rank. Empty where equal shards do that. Between hosts, RS moves what other hosts own,
    and AG what this host owns: of H hosts, one that owns more than 1/H sends more than the others.
    """
    counts = [list(hosts).count(host) for host in hosts]
    return () if len(set(counts)) == 1 else tuple(lcm(*counts) // count for count in counts)


def ends_of(numel: int, shares: Sequence[int], align: int) -> tuple[int, ...]:
    """Return where each rank's shard of a bucket ends, a multiple of ``align``; empty without shares."""
    return tuple(numel // align * share // sum(shares) * align for share in accumulate(shares))


def _place(
    layout: Layout, group: int, piece: Piece, cursor: int, numel: int, itemsize: int, align: int
) -> int:
    """Give a tensor its slot at its first piece; return the position behind the piece."""
    slot = layout.slots.get(piece.layer)
    if slot is None:
        if piece.start != 0:
            raise ValueError(
                f"the first bucket that names tensor {piece.layer} holds its bytes from {piece.start} on; a"
                " split tensor must be in consecutive buckets of its group, in order of its bytes"
            )
        slot = layout.slots[piece.layer] = Slot(piece.layer, group, _round_up(cursor, align), numel)
    stop = slot.offset + -(-piece.stop // itemsize)
    return max(cursor, slot.offset + slot.numel if piece.stop >= numel * itemsize else stop)


def _check_continues(buckets: list[tuple[int, Bucket]], position: int, cut: Piece) -> None:
    following = buckets[position + 1][1].pieces[0] if position + 1 < len(buckets) else None
    if following is None or (following.layer, following.start) != (cut.layer, cut.stop):
        raise ValueError(
            f"bucket {buckets[position][0]} ends inside tensor {cut.layer} at byte {cut.stop}, but the next"
            f" bucket of its group starts with {following}; a split tensor must be in consecutive buckets"
        )


def _register(layout: Layout, group: int) -> None:
    """Record each slot's buckets and each bucket's parameters, by the final positions."""
    slices = sorted((s for s in layout.slices if s.group == group), key=lambda s: s.start)
    slots = sorted((s for s in layout.slots.values() if s.group == group), key=lambda s: s.offset)
    for piece in slices:
        inside = [s for s in slots if s.offset < piece.stop and s.offset + s.numel > piece.start]
        piece.params = tuple(slot.param for slot in inside)
        for slot in inside:
            slot.buckets.append(piece.number)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Buffers:
    """The flat tensors of a layout, allocated by the backend's ``zeros``, and views of them."""

    def __init__(
        self,
        layout: Layout,
        kinds: dict[int, tuple[torch.dtype, torch.device]],
        zeros: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:
        self.layout, self._kinds, self._zeros = layout, kinds, zeros
        self.flat = {
            group: zeros(layout.lengths[group], dtype=dtype, device=device)
            for group, (dtype, device) in kinds.items()
        }

    def more(self, groups: Iterable[int] | None = None) -> Buffers:
        """Return another set of the same tensors, or of those of some groups."""
        kinds = self._kinds if groups is None else {group: self._kinds[group] for group in groups}
        return Buffers(self.layout, kinds, self._zeros)

    def view(self, like: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Return the slot in the shape of ``like``, with its strides if they leave no holes in memory."""
        part = self.flat[slot.group].narrow(0, slot.offset, slot.numel)
        # empty_like() keeps the strides of a tensor that fills its memory, and makes up new ones otherwise.
        if torch.empty_like(like, device="meta").stride() == like.stride():
            return part.as_strided(like.size(), like.stride(), part.storage_offset())
        return part.view(like.size())

    def bucket(self, number: int) -> torch.Tensor:
        piece = self.layout.slices[number]
        return self.flat[piece.group].narrow(0, piece.start, piece.numel)

    def corrected(self, number: int) -> torch.Tensor | None:
        """Return the memory whose rows a bucket corrects; None for other buckets."""
        param, piece = self.layout.corrected(number), self.layout.slices[number]
        if param is None:
            return None
        slot = self.layout.slots[param]
        return self.flat[slot.group].narrow(0, slot.offset + piece.start, piece.numel)
