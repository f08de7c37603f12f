"""Interval arithmetic against brute force."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from commsched.spatial.fetch import Dim, make_plan
from commsched.spatial.intervals import (
    Fill,
    Padding,
    Run,
    Split,
    TransposedWindow,
    Window,
    clipped,
    pad_want,
    want_length,
)

sizes = st.integers(1, 40)
windows = st.builds(
    Window, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)
)


@st.composite
def splits(draw: st.DrawFn, size: int | None = None) -> Split:
    size = draw(sizes) if size is None else size
    inner = draw(st.lists(st.integers(0, size), max_size=5))
    return Split((0, *sorted(inner), size))


def read(want: tuple, source: list) -> list:
    """What a want delivers from a whole dimension."""
    found: list = []
    for part in want:
        pixels = [None] * len(part) if isinstance(part, Fill) else source[part.lo : part.hi]
        found += pixels[::-1] if isinstance(part, Run) and part.flip else pixels
    return found


def test_even_splits_differ_by_one_pixel_at_most() -> None:
    assert Split.even(14, 4).bounds == (0, 3, 7, 10, 14)


def test_more_tiles_than_pixels_names_both() -> None:
    with pytest.raises(ValueError, match="3 pixels into 4 tiles"):
        Split.even(3, 4)


@pytest.mark.parametrize("bounds", [(1, 4), (0, 3, 2), (0,)])
def test_bounds_that_are_no_split(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="split bounds"):
        Split(bounds)


@given(splits())
def test_every_pixel_has_one_owner(split: Split) -> None:
    owners = [p for p in range(split.parts) for _ in range(*split.owned(p))]
    assert owners == [split.part_of(pixel) for pixel in range(split.size)]


@given(windows, sizes)
def test_need_is_exactly_the_taps(window: Window, size: int) -> None:
    for lo in range(3):
        taps = {
            o * window.stride - window.before + window.dilation * t
            for o in range(lo, lo + 2)
            for t in range(window.kernel)
        }
        assert window.need(lo, lo + 2) == (min(taps), max(taps) + 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), sizes, st.booleans())
def test_number_of_outputs_is_torchs(
    kernel: int, stride: int, dilation: int, padding: int, size: int, ceil: bool
) -> None:
    padding = min(padding, kernel // 2)
    window = Window(kernel, stride, dilation, padding, padding)
    if window.outputs(size, ceil) < 1 or size + 2 * padding < window.span:
        return
    pooled = F.max_pool1d(torch.zeros(1, 1, size), kernel, stride, padding, dilation, ceil_mode=ceil)
    assert window.outputs(size, ceil) == pooled.shape[-1]


@given(windows, splits())
def test_each_output_is_owned_once_and_near_its_window(window: Window, split: Split) -> None:
    count = window.outputs(split.size)
    if count < 1:
        return
    out = window.split(split, count)
    assert (out.size, out.parts) == (count, split.parts)
    for part in range(out.parts):
        for o in range(*out.owned(part)):
            middle = o * window.stride - window.before + (window.span - 1) // 2
            assert (
                part == split.part_of(min(max(middle, 0), split.size - 1))
                or split.owned(part) == (0, 0)
                or (middle < 0 or middle >= split.size)
            )


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    sizes,
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_transposed_need_has_every_input_that_writes(
    kernel: int, stride: int, dilation: int, before: int, size: int, lo: int, count: int
) -> None:
    window = TransposedWindow(kernel, stride, dilation, before, before)
    writers = [
        i
        for i in range(size)
        if any(lo <= i * stride - before + dilation * t < lo + count for t in range(kernel))
    ]
    start, stop = window.need(lo, lo + count)
    assert all(start <= i < stop for i in writers)


@given(st.integers(-10, 50), st.integers(0, 20), sizes)
def test_clipped(lo: int, length: int, size: int) -> None:
    source = list(range(size))
    expected = [p if 0 <= p < size else None for p in range(lo, lo + length)]
    assert read(clipped(lo, lo + length, size), source) == expected


@given(st.sampled_from(["reflect", "replicate", "circular"]), st.data())
def test_padding_reads_what_torch_reads(mode: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    most = size - 1 if mode == "reflect" else size
    before, after = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
    padded = (
        F.pad(torch.arange(size, dtype=torch.float64).view(1, 1, -1), (before, after), mode)
        .flatten()
        .tolist()
    )
    lo = data.draw(st.integers(0, len(padded)))
    hi = data.draw(st.integers(lo, len(padded)))
    want = pad_want(lo - before, hi - before, size, mode)
    assert read(want, [float(i) for i in range(size)]) == padded[lo:hi]
    assert want_length(want) == hi - lo


@given(st.sampled_from(["constant", "reflect", "replicate"]), splits(), st.data())
def test_padding_keeps_the_margin_that_parts_hold(mode: str, source: Split, data: st.DataObject) -> None:
    source = source.with_margin(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    low, most = (-source.size // 2, 9) if mode == "constant" else (0, source.size - 1)
    padding = Padding(source.size, *(data.draw(st.integers(low, most)) for _ in range(2)), mode)
    out = padding.split(source)
    assert out.size == source.size + padding.before + padding.after
    owned = [padding.want(*out.owned(part)) for part in range(out.parts)]
    local = all(within(want, source.held(part)) for part, want in enumerate(owned))
    for part in range(out.parts):
        if local:
            assert within(padding.want(*out.held(part)), source.held(part))
        else:
            assert out.margin == (0, 0)
    full = len(set(source.bounds)) == len(source.bounds)  # no part is empty
    if mode == "constant" and full and min(padding.before, padding.after) >= 0:
        assert all(kept >= held for kept, held in zip(out.margin, source.margin))


def within(want: tuple, held: tuple[int, int]) -> bool:
    return all(held[0] <= part.lo and part.hi <= held[1] for part in want if isinstance(part, Run))


@given(st.data())
def test_plans_deliver_every_pixel_once(data: st.DataObject) -> None:
    """All ranks' plans together: a buffer gets what it wants, and both ends agree on every message."""
    split = data.draw(splits())
    margin = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    split = split.with_margin(margin)
    intervals = [
        sorted((data.draw(st.integers(-5, split.size + 5)), data.draw(st.integers(-5, split.size + 5))))
        for _ in range(split.parts)
    ]
    wants = tuple(clipped(lo, hi, split.size) for lo, hi in intervals)
    dims = (Dim(-1, split, tuple(range(split.parts)), wants),)
    plans = [make_plan(r, dims, (0,) * split.parts) for r in range(split.parts)]
    whole = list(range(split.size))
    for target, plan in enumerate(plans):
        buffer: list = [None] * plan.wanted[0]
        for source, found in (*plan.recvs, (target, plan.own)):
            tile = whole[slice(*split.held(source))]
            if source != target:
                assert dict(plans[source].sends)[target] == found
            for piece in found:
                assert all(pixel is None for pixel in buffer[slice(*piece.dst[0])])
                buffer[slice(*piece.dst[0])] = tile[slice(*piece.src[0])]
        assert buffer == read(wants[target], whole)
    anything = any(plan.sends or plan.recvs for plan in plans)
    assert all(plan.remote == plans[0].remote for plan in plans) and (plans[0].remote or not anything)


def test_no_message_leaves_the_image() -> None:
    """Padding is filled at the border, not sent: the outer ranks of a row have one neighbour each."""
    window, split = Window(3, before=1, after=1), Split.even(12, 3)
    out = window.split(split, 12)
    wants = tuple(clipped(*window.need(*out.owned(part)), 12) for part in range(3))
    plans = [make_plan(r, (Dim(-1, split, (0, 1, 2), wants),), (0, 0, 0)) for r in range(3)]
    assert [[peer for peer, _ in plan.sends] for plan in plans] == [[1], [0, 2], [1]]
    assert [[rect.shape for _, rects in plan.sends for rect in rects] for plan in plans] == [
        [(1,)],
        [(1,), (1,)],
        [(1,)],
    ]


def test_a_tile_smaller_than_the_halo_is_fetched_over_several_hops() -> None:
    split = Split.even(5, 5)
    wants = tuple(clipped(part - 2, part + 3, 5) for part in range(5))
    plan = make_plan(0, (Dim(-1, split, tuple(range(5)), wants),), (0,) * 5)
    assert [peer for peer, _ in plan.recvs] == [1, 2]
