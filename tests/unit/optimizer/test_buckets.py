"""Layouts: whatever the buckets, every gradient has one whole place and every element one bucket."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.optimizer.buckets import ALIGN, Buffers, build_layout, shares_by_host
from commsched.optimizer.planner import balanced, whole_buckets
from scheduler.ir.buckets import Bucket, Piece, check_cover, fuse_by_bytes

SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=12)


def buckets_for(numels: list[int], seed: int, itemsize: int = 4) -> tuple[Bucket, ...]:
    dice = random.Random(seed)
    return fuse_by_bytes(
        [n * itemsize for n in numels],
        dice.choice([1, 100, 1000, 5000, 10**6]),
        first=dice.choice([None, 64, 2000]),
        part=dice.choice([None, 64, 200, 4096]),
    )


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([ALIGN, 256]))
def test_slots_are_whole_and_apart_and_slices_cover_everything(
    numels: list[int], seed: int, ranks: int, align: int
) -> None:
    buckets = buckets_for(numels, seed)
    layout = build_layout(numels, [4] * len(numels), buckets, ranks, alignment={0: align})
    assert set(layout.slots) == {i for i, n in enumerate(numels) if n}
    slots = sorted(layout.slots.values(), key=lambda s: s.offset)
    for slot in slots:
        assert slot.numel == numels[slot.param] and slot.offset % align == 0
    for a, b in zip(slots, slots[1:], strict=False):
        assert a.offset + a.numel <= b.offset
    slices = sorted(layout.slices, key=lambda s: s.start)
    assert [s.number for s in layout.slices] == list(range(len(buckets)))
    position = 0
    for piece in slices:
        assert piece.start == position <= piece.stop and piece.numel % (ranks * align) == 0
        position = piece.stop
    assert position == layout.lengths.get(0, 0)
    assert all(slot.offset + slot.numel <= position for slot in slots)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 10**6), st.integers(1, 5))
def test_slots_and_slices_name_each_other(numels: list[int], seed: int, ranks: int) -> None:
    layout = build_layout(numels, [4] * len(numels), buckets_for(numels, seed), ranks)
    for slot in layout.slots.values():
        overlapping = [
            s.number for s in layout.slices if s.start < slot.offset + slot.numel and slot.offset < s.stop
        ]
        assert sorted(slot.buckets) == sorted(overlapping) != []
        assert all(slot.param in layout.slices[b].params for b in slot.buckets)
    for piece in layout.slices:
        assert all(piece.number in layout.slots[i].buckets for i in piece.params)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(0, 10**6), st.integers(1, 5))
def test_shards_cut_a_slice_into_equal_parts(numels: list[int], seed: int, ranks: int) -> None:
    for piece in build_layout(numels, [4] * len(numels), buckets_for(numels, seed), ranks).slices:
        shards = [piece.shard(rank, ranks) for rank in range(ranks)]
        assert shards[0][0] == piece.start and shards[-1][1] == piece.stop
        assert len({stop - start for start, stop in shards}) == 1
        assert all(a[1] == b[0] for a, b in zip(shards, shards[1:], strict=False))


@settings(max_examples=100, deadline=None)
@given(
    SIZES, st.integers(0, 10**6), st.sampled_from(["aaab", "aab", "aabc", "baab", "abbbbcc", "aabb", "ab"])
)
def test_hosts_own_as_much_of_a_slice_however_many_ranks_they_have(
    numels: list[int], seed: int, hosts: str
) -> None:
    shares, ranks = shares_by_host(list(map(ord, hosts))), len(hosts)
    assert bool(shares) == (len({hosts.count(host) for host in hosts}) > 1)
    layout = build_layout(numels, [4] * len(numels), buckets_for(numels, seed), ranks, shares=shares)
    equal = build_layout(numels, [4] * len(numels), buckets_for(numels, seed), ranks)
    assert layout.slots == equal.slots
    for piece in layout.slices:
        shards = [piece.shard(rank, ranks) for rank in range(ranks)]
        assert shards[0][0] == piece.start and shards[-1][1] == piece.stop
        assert all(a[1] == b[0] and a[1] % ALIGN == 0 for a, b in pairwise(shards))
        for host in set(hosts):
            owned = sum(b - a for (a, b), of in zip(shards, hosts, strict=True) if of == host)
            assert abs(owned - piece.numel / len(set(hosts))) <= hosts.count(host) * ALIGN


def test_groups_have_buffers_of_their_own() -> None:
    buckets = (
        Bucket((Piece(2, 0, 80),), 1),
        Bucket((Piece(1, 0, 40), Piece(0, 0, 12)), 0),
    )
    layout = build_layout([3, 10, 10], [4, 4, 8], buckets, 2)
    assert [layout.slots[i].group for i in range(3)] == [0, 0, 1]
    buffers = Buffers(
        layout, {0: (torch.float32, torch.device("cpu")), 1: (torch.float64, torch.device("cpu"))}
    )
    assert buffers.flat[0].dtype == torch.float32 and buffers.flat[1].dtype == torch.float64
    assert layout.slots[1].offset < layout.slots[0].offset  # as the bucket names them


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(5, 7),
        torch.zeros(7, 5).t(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(()),
        torch.zeros(1, 9, 1),
        torch.zeros(10, 8)[:, ::2],
    ],
)
def test_views_have_the_shape_and_dense_strides_of_the_parameter(like: torch.Tensor) -> None:
    numel = like.numel()
    layout = build_layout([3, numel], [4, 4], fuse_by_bytes([12, 4 * numel], 1e6), 2)
    buffers = Buffers(layout, {0: (torch.float32, torch.device("cpu"))})
    view = buffers.view(like, layout.slots[1])
    assert view.shape == like.shape
    assert view.stride() == torch.empty_like(like).stride()
    values = torch.arange(numel, dtype=torch.float32).view(like.shape)
    view.copy_(values)
    slot = layout.slots[1]
    assert sorted(buffers.flat[0][slot.offset : slot.offset + numel].tolist()) == list(range(numel))
    assert torch.equal(view, values)


def test_a_torn_tensor_is_refused() -> None:
    torn = (Bucket((Piece(0, 0, 64),)), Bucket((Piece(1, 0, 40),)), Bucket((Piece(0, 64, 400),)))
    with pytest.raises(ValueError, match="consecutive buckets"):
        build_layout([100, 10], [4, 4], torn, 2)
    with pytest.raises(ValueError, match="in order of its bytes"):
        build_layout([100], [4], (Bucket((Piece(0, 64, 400),)), Bucket((Piece(0, 0, 64),))), 2)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 100), st.integers(1, 5))
def test_owned_parameters_lie_whole_in_their_owners_shard(numels: list[int], wanted: int, ranks: int) -> None:
    """And shards hold nothing else but the gaps that align parameters."""
    sizes, owners = [4 * n for n in numels], balanced([float(n) for n in numels], ranks)
    buckets = whole_buckets(sizes, [0] * len(sizes), owners, ranks, 40 * wanted)
    check_cover(buckets, sizes)
    layout = build_layout(numels, [4] * len(numels), buckets, ranks, owners)
    for i, slot in layout.slots.items():
        (number,) = slot.buckets
        start, stop = layout.slices[number].shard(owners[i], ranks)
        assert start <= slot.offset and slot.offset + slot.numel <= stop
    assert layout.lengths.get(0, 0) == sum(-(-n // ALIGN) * ALIGN for n in numels)
    for piece in layout.slices:
        bounds = [piece.shard(rank, ranks) for rank in range(ranks)]
        assert bounds[0][0] == piece.start and bounds[-1][1] == piece.stop
        assert all(a[1] == b[0] for a, b in pairwise(bounds))


def test_owners_share_the_work_and_neighbours_have_different_ones() -> None:
    assert balanced([5.0, 1.0, 4.0, 1.0, 3.0], 2) == [0, 0, 1, 0, 1]
    assert balanced([2.0] * 6, 3) == [2, 1, 0, 2, 1, 0]
    costs = [float(n % 7 + 1) for n in range(60)]
    load = [sum(c for c, o in zip(costs, balanced(costs, 4), strict=True) if o == rank) for rank in range(4)]
    assert max(load) <= sum(costs) / 4 + max(costs) / 4


def test_whole_buckets_wait_until_their_parts_are_even() -> None:
    """Two layers of one owner stay open for a third; a huge layer closes its bucket alone."""
    buckets = whole_buckets([10, 10, 10], [0] * 3, [1, 0, 0], 2, 20)
    assert [b.layers for b in buckets] == [(0, 1, 2)]
    buckets = whole_buckets([10, 10, 100], [0] * 3, [0, 1, 0], 2, 20)
    assert [b.layers for b in buckets] == [(2,), (0, 1)]


def test_owned_parameters_may_not_be_cut() -> None:
    cut = [Bucket((Piece(0, 0, 64),)), Bucket((Piece(0, 64, 400),))]
    with pytest.raises(ValueError, match="bytes 0..64 of the 400 of tensor 0; this optimizer updates whole"):
        build_layout([100], [4], cut, 2, [0])
