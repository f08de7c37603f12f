"""Buckets of rows: the bits of whole buckets, from messages that hold touched rows only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import DirectTransport, Engine, EngineError, PythonTransport, RingTransport, local_channels
from tests.support.engines import local_engines, on_ranks, run_step

SPECIAL = (0.0, -0.0, 1.5, -3.25, 1e-8, 65000.0, float("inf"), float("nan"))


def reduced(
    data: Sequence[torch.Tensor], plan: Sequence[str], row: int, **options: Any
) -> list[torch.Tensor]:
    """Every rank's bucket after two steps, of which the second one must not see the first."""
    size = len(data)
    # Without rows, one rank owns everything: the bucket needs no padding then.
    ends = [] if row else [data[0].numel()] * size

    def one(engine: Engine, rank: int) -> torch.Tensor:
        buffer = data[rank].flip(0).reshape(-1).clone()
        bucket = engine.add_bucket(buffer, row=row, ends=ends, name="table", **options)
        engine.install([(op, bucket) for op in plan])
        run_step(engine, [bucket])
        buffer.copy_(data[rank].reshape(-1))
        run_step(engine, [bucket])
        return buffer

    with local_engines(size, segment_bytes=64) as engines:
        return on_ranks(size, lambda rank: one(engines[rank], rank))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@st.composite
def tables(draw: st.DrawFn) -> list[torch.Tensor]:
    """A table of each rank, in which most rows are zero and some touched rows hold nothing but zeros."""
    size, rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 30)), draw(st.integers(1, 19))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(-8, 8, width=16))
    found = []
    for _ in range(size):
        table = torch.zeros(rows, width, dtype=dtype)
        for k in draw(st.sets(st.integers(0, rows - 1), max_size=6)):
            table[k] = torch.tensor(draw(st.lists(value, min_size=width, max_size=width)), dtype=dtype)
        found.append(table)
    return found


@settings(max_examples=60, deadline=None)
@given(
    tables(),
    st.sampled_from([("RS", "AG"), ("AR",)]),
    st.sampled_from([1.0, 0.25]),
    st.booleans(),
)
def test_rows_give_the_bits_of_whole_buckets(
    data: list[torch.Tensor], plan: tuple[str, ...], prescale: float, compressed: bool
) -> None:
    wire = torch.float16 if compressed and data[0].dtype != torch.bfloat16 else None
    options = {"prescale": prescale, "postscale": 1 / len(data), "wire_dtype": wire}
    whole = reduced(data, plan, 0, **options)
    for mine, theirs in zip(reduced(data, plan, data[0].shape[1], **options), whole, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


def test_messages_hold_touched_rows_only() -> None:
    """Row k belongs to rank k % 3: its sum comes from the ranks that touched it, and goes to all others."""
    touched, width = {0: [3, 4], 1: [4], 2: []}, 5

    def one(engine: Engine, rank: int) -> dict[str, int]:
        table = torch.zeros(6, width)
        table[touched[rank]] = 1.0
        bucket = engine.add_bucket(table.view(-1), row=width)
        engine.install([("RS", bucket), ("AG", bucket)])
        run_step(engine, [bucket])
        assert table.sum(1).tolist() == [0, 0, 0, width, 2 * width, 0]
        return {("RS", "AG")[event["op"]]: int(event["bytes"]) for event in engine.events()}

    def message(*numbers: int) -> int:
        """The bytes of messages with so many rows: a count, numbers up to a multiple of 8 bytes, rows."""
        return sum(8 + -(-4 * n // 8) * 8 + n * width * 4 for n in numbers)

    with local_engines(3) as engines:
        sent = on_ranks(3, lambda rank: one(engines[rank], rank))
    assert [rank["RS"] for rank in sent] == [message(1, 0), message(0, 0), message(0, 0)]
    assert [rank["AG"] for rank in sent] == [message(1, 1), message(1, 1), message(0, 0)]


def test_all_rows_of_a_large_table_pass_in_segments() -> None:
    data = [torch.randn(301, 70, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for result in reduced(data, ("RS", "AG"), 70):
        assert torch.equal(result.view(301, 70), data[0] + data[1] + data[2])


def test_a_correction_may_be_empty() -> None:
    """Two cuts of a tied weight may fall into one row. Tensors without elements have no address in torch."""
    empty = torch.empty(0)
    for row in (4, 0):
        add = partial(engine_alone(DirectTransport).add_bucket, empty, gather=empty, row=row, name="weight")
        if row:
            assert add(changed=torch.zeros(1, dtype=torch.int32)) == 0
        else:
            with pytest.raises(EngineError, match="cannot have changed= without row="):
                add(changed=torch.zeros(1, dtype=torch.int32))


def engine_alone(kind: Any, **options: Any) -> Engine:
    return Engine(kind(local_channels(2)[0], 0, 2, **options), 0, 2)


@pytest.mark.parametrize(
    "engine, options, words",
    [
        (lambda: engine_alone(DirectTransport), {"row": 5}, "whole rows.*12 elements.*a row has 5"),
        (lambda: engine_alone(DirectTransport), {"row": 4, "ends": [4, 12]}, "no ends of parts"),
        (lambda: engine_alone(DirectTransport), {"row": 4, "gather": torch.ones(12)}, "gathers parameters"),
        (lambda: engine_alone(DirectTransport), {"row": 4, "wire_dtype": torch.int8}, "rows have no blocks"),
        (lambda: engine_alone(RingTransport), {"row": 4}, "the ring sends whole buckets.*direct exchange"),
        (
            lambda: Engine(PythonTransport(SimpleNamespace(rank=0, size=2)), 0, 2),
            {"row": 4},
            "Python transport sends whole buckets.*direct exchange",
        ),
    ],
)
def test_buckets_that_cannot_travel_by_rows_are_refused(engine: Any, options: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        engine().add_bucket(torch.ones(12), name="table", **options)
