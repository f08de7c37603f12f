"""Actions and buckets: text that round-trips, and errors that say what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ir.actions import SENDS, TRANSFER, Action, Kind, format_actions, parse_action, parse_actions
from scheduler.ir.buckets import ALIGNMENT, Bucket, Piece, check_cover, fuse_by_bytes, one_per_layer

numbers = st.integers(0, 10**6)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    return Action(
        kind,
        -1 if kind is Kind.STEP else draw(numbers),
        draw(st.none() | numbers),
        draw(st.none() | st.integers(-3, 100)),
        draw(numbers) if kind in TRANSFER else None,
        draw(st.integers(-9, 9)),
    )


@given(st.lists(actions(), max_size=8))
def test_text_round_trips(program: list[Action]) -> None:
    assert parse_actions(format_actions(program)) == tuple(program)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3", Action(Kind.F, 3)),
        ("RS0", Action(Kind.RS, 0)),
        ("2F1@4", Action(Kind.F, 1, stage=2, version=4)),
        ("2SENDF1>3", Action(Kind.SENDF, 1, stage=2, peer=3)),
        ("3RECVF1<2", Action(Kind.RECVF, 1, stage=3, peer=2)),
        ("2STEP", Action(Kind.STEP, stage=2)),
        ("AG0-1", Action(Kind.AG, 0, shift=-1)),
        ("HALOB5", Action(Kind.HALOB, 5)),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "X3", "RS", "F-1", "SENDF1", "F1>2", "SENDF1<2", "RECVF1>2", "AG0 AG1", "RS1.5"]
)
def test_bad_text_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="not an action") as error:
        parse_action(text)
    assert repr(text) in str(error.value)


def test_sends_and_receives_are_apart() -> None:
    assert {Kind.SENDF, Kind.SENDB} == set(SENDS)


sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=8)


@given(sizes, st.integers(1, 6000), st.none() | st.integers(1, 6000), st.none() | st.integers(1, 2000))
def test_fused_buckets_cover_every_byte(
    sizes: list[int], limit: int, first: int | None, part: int | None
) -> None:
    buckets = fuse_by_bytes(sizes, limit, first, part)
    check_cover(buckets, sizes)
    ready = [bucket.ready_layer for bucket in buckets]
    assert ready == sorted(ready, reverse=True)
    if part is not None:
        assert all(piece.bytes < part + ALIGNMENT for bucket in buckets for piece in bucket.pieces)


def test_one_bucket_per_layer_leaves_out_layers_without_bytes() -> None:
    assert one_per_layer([4, 0, 6]) == (Bucket((Piece(2, 0, 6),)), Bucket((Piece(0, 0, 4),)))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([[(0, 0, 4)]], "cover 0 of the 6 bytes of layer 1"),
        ([[(0, 0, 4)], [(1, 0, 6)], [(1, 2, 3)]], "of layer 1 stand twice"),
        ([[(0, 0, 1), (0, 2, 4)], [(1, 0, 6)]], "bytes 1..2 of layer 0 stand in no bucket"),
        ([[(0, 0, 4)], [(1, 0, 5)]], "cover 5 of the 6 bytes of layer 1"),
        ([[(2, 0, 4)]], "names layer 2; the profile has 2 layers"),
        ([[]], "bucket 0 is empty"),
    ],
)
def test_bad_cover(buckets: list[list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cover([Bucket(tuple(Piece(*piece) for piece in pieces)) for pieces in buckets], [4, 6])


@pytest.mark.parametrize("limits", [(0, None, None), (1, 0, None), (1, None, -1)])
def test_bucket_sizes_must_be_positive(limits: tuple[int, int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="bucket sizes must be positive"):
        fuse_by_bytes([4], *limits)
