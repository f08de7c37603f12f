"""A part of each gradient is summed first; then the rows that something has been added to are summed anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import Engine, EngineError, changed_rows
from tests.support.engines import local_engines, on_ranks, run_step

SPECIAL = (0.0, -0.0, 1.5, -3.25, 1e-8, 65000.0, float("inf"), float("nan"))
Tables = list[tuple[torch.Tensor, torch.Tensor]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({4: torch.int32, 8: torch.int64}[tensor.element_size()])


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Each rank's part of a gradient, and the whole one, to which autograd has added zeros in most rows."""
    size, rows, width = draw(st.integers(2, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(-8, 8, width=16))
    line = st.lists(value, min_size=width, max_size=width)
    found = []
    for _ in range(size):
        part = torch.tensor(draw(st.lists(line, min_size=rows, max_size=rows)), dtype=dtype)
        added = torch.zeros(rows, width, dtype=dtype)
        for k in draw(st.sets(st.integers(0, rows - 1), max_size=4)):
            added[k] = torch.tensor(draw(line), dtype=dtype)
        found.append((part, part + added))
    return found


def summed_whole(data: Tables, **options: Any) -> list[torch.Tensor]:
    def one(engine: Engine, rank: int) -> torch.Tensor:
        whole = data[rank][1].clone()
        # One rank owns everything: the bucket needs no padding then.
        bucket = engine.add_bucket(whole.view(-1), ends=[whole.numel()] * len(data), **options)
        engine.install([("AR", bucket)])
        run_step(engine, [bucket])
        return whole

    with local_engines(len(data), segment_bytes=64) as engines:
        return on_ranks(len(data), lambda rank: one(engines[rank], rank))


def summed_in_parts(data: Tables, early: bool, **options: Any) -> list[torch.Tensor]:
    """Every rank's sums after two steps, of which the second one must not see the first."""

    def one(engine: Engine, rank: int) -> torch.Tensor:
        part, whole = data[rank]
        sums, again = torch.zeros_like(part), torch.zeros_like(part)
        changed = torch.zeros(1 + len(part), dtype=torch.int32)
        flat = sums.view(-1)
        head = engine.add_bucket(flat, ends=[flat.numel()] * len(data), name="head", **options)
        rest = engine.add_bucket(
            again.view(-1), gather=flat, row=part.shape[1], changed=changed, name="rest", **options
        )
        scatter, gather = ("RS", rest), ("AG", rest)
        engine.install(
            [("RS", head), *([scatter, ("AG", head)] if early else [("AG", head), scatter]), gather]
        )
        for first, last in ((part.flip(0), whole.flip(0)), (part, whole)):
            sums.copy_(first + 0.0)
            again.copy_(last)
            changed_rows(first.contiguous(), again, changed)
            run_step(engine, [head, rest])
        return sums

    with local_engines(len(data), segment_bytes=64) as engines:
        return on_ranks(len(data), lambda rank: one(engines[rank], rank))


@settings(max_examples=60, deadline=None)
@given(tables(), st.booleans(), st.sampled_from([1.0, 0.25]), st.booleans())
def test_corrected_rows_have_the_bits_of_whole_sums(
    data: Tables, early: bool, prescale: float, compressed: bool
) -> None:
    wire = torch.bfloat16 if compressed else None
    options = {"prescale": prescale, "postscale": 1 / len(data), "wire_dtype": wire}
    for mine, theirs in zip(
        summed_in_parts(data, early, **options), summed_whole(data, **options), strict=True
    ):
        assert torch.equal(bits(mine), bits(theirs))


def test_only_rows_that_a_rank_has_changed_travel() -> None:
    """Row k belongs to rank k % 2. Rank 0 changes row 4, which is its own, rank 1 rows 1 and 4."""
    changes = {0: [4], 1: [1, 4]}

    def one(engine: Engine, rank: int) -> tuple[list[int], list[int]]:
        sums, again = torch.zeros(40), torch.ones(40)
        changed = torch.zeros(9, dtype=torch.int32)
        head = engine.add_bucket(sums)
        rest = engine.add_bucket(again, gather=sums, row=5, changed=changed)
        engine.install([("AR", head), ("RS", rest), ("AG", rest)])
        changed[: 1 + len(changes[rank])] = torch.tensor([len(changes[rank]), *changes[rank]])
        run_step(engine, [head, rest])
        assert sums.view(8, 5)[:, 0].tolist() == [0, 2, 0, 0, 2, 0, 0, 0]
        events = engine.events()
        return changed[:3].tolist(), events[events["bucket"] == rest]["bytes"].tolist()

    with local_engines(2) as engines:
        found = on_ranks(2, lambda rank: one(engines[rank], rank))

    def message(rows: int, row_bytes: int) -> int:
        return 8 + (rows * 4 + 7) // 8 * 8 + rows * row_bytes

    # RS: the numbers of changed rows, then the rows of the union that the other rank owns. AG: the own sums.
    assert found == [
        ([2, 1, 4], [message(1, 0) + message(1, 20), message(1, 20)]),
        ([2, 1, 4], [message(2, 0) + message(1, 20), message(1, 20)]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_changed_where_bits_differ_from_the_part_with_zeros_added(dtype: torch.dtype) -> None:
    nan = float("nan")
    part = torch.tensor([[0.0, -0.0], [-0.0, 1.0], [2.0, 3.0], [nan, 1.0], [4.0, 4.0]], dtype=dtype)
    whole = part + 0.0
    whole[1, 0] = -0.0
    whole[2, 1] = 3.5
    changed = torch.full((6,), 7, dtype=torch.int32)
    changed_rows(part, whole, changed)
    assert changed[:3].tolist() == [2, 1, 2]


def test_rows_of_other_tensors_are_refused() -> None:
    part, changed = torch.zeros(3, 2), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(EngineError, match="two contiguous matrices of one shape and type"):
        changed_rows(part, torch.zeros(3, 3), changed)
    with pytest.raises(EngineError, match="rows of float32 and float64 can be compared, not of"):
        changed_rows(part.half(), part.half(), changed)
    with pytest.raises(EngineError, match=r"int32 on the CPU with 1 \+ 3 elements.*but it has 3 of Int"):
        changed_rows(part, part, changed[:3])


def test_a_correction_needs_rows_and_a_gathered_buffer() -> None:
    data, changed = torch.zeros(6), torch.zeros(4, dtype=torch.int32)
    with local_engines(1) as (engine,):
        with pytest.raises(EngineError, match="cannot have changed= without row= and without gather="):
            engine.add_bucket(data, row=2, changed=changed)
        with pytest.raises(EngineError, match=r"int32 on the CPU with 1 \+ 3 elements"):
            engine.add_bucket(data, gather=torch.zeros(6), row=2, changed=changed[:2])
