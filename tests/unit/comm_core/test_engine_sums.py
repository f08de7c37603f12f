"""The numbers: sums are right, in rank order, and do not depend on the plan, the buckets or the weather."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import Engine
from tests.support.engines import local_engines, on_ranks, ordered_sum, run_step
from tests.support.rounding import rounding

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
HALVES = [torch.float16, torch.bfloat16]
Plan = list[tuple[str, int]]


def values(size: int, count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, count, generator=generator, dtype=torch.float64) * 20
    return list(wide.abs().to(dtype) if dtype == torch.uint8 else wide.to(dtype))


def assert_rounded(
    result: torch.Tensor, expected: torch.Tensor, data: list[torch.Tensor], dtype: torch.dtype, terms: int
) -> None:
    """Each element within the rounding of a sum of so many terms, which is a share of their magnitudes."""
    if not dtype.is_floating_point:
        assert torch.equal(result, expected)
        return
    magnitudes = torch.stack([part.double().abs() for part in data]).sum(0)
    apart = (result.double() - expected.double()).abs()
    assert (apart <= rounding(dtype, terms) * magnitudes).all(), (apart / magnitudes).max()


def reduce_all(
    size: int,
    data: list[torch.Tensor],
    plan: Plan,
    wire: torch.dtype | None = None,
    scale: float = 1.0,
    ring: bool = False,
    prescale: float = 1.0,
    ends: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Every rank's one bucket after a step."""

    def one(engine: Engine, rank: int) -> torch.Tensor:
        buffer = data[rank].clone()
        bucket = engine.add_bucket(
            buffer, wire_dtype=wire, prescale=prescale, postscale=scale, name="all", ends=ends
        )
        engine.install([(op, bucket) for op, _ in plan])
        run_step(engine, [bucket])
        return buffer

    with local_engines(size, ring=ring) as engines:
        return on_ranks(size, lambda rank: one(engines[rank], rank))


SPLIT: Plan = [("RS", 0), ("AG", 0)]
FUSED: Plan = [("AR", 0)]


@pytest.mark.parametrize("plan", [SPLIT, FUSED], ids=["split", "fused"])
@pytest.mark.parametrize("per_rank", [0, 1, 7, 101])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direct_sums_in_rank_order_to_the_bit(
    dtype: torch.dtype, size: int, per_rank: int, plan: Plan
) -> None:
    data = values(size, size * per_rank, dtype)
    for result in reduce_all(size, data, plan):
        torch.testing.assert_close(result, ordered_sum(data), rtol=0, atol=0)


@pytest.mark.parametrize("ring", [False, True], ids=["direct", "ring"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "lengths", [(0, 50), (131, 1), (0, 0, 70), (1, 97, 0), (40, 0, 0, 33), (3, 200, 17, 64)], ids=str
)
def test_parts_of_unequal_length_give_the_same_sums(
    lengths: tuple[int, ...], wire: torch.dtype | None, ring: bool
) -> None:
    """Among them ranks without a part, and parts of several segments beside parts of one."""
    size, ends = len(lengths), [sum(lengths[: n + 1]) for n in range(len(lengths))]
    data = values(size, ends[-1], torch.float32)
    results = reduce_all(size, data, SPLIT, wire=wire, scale=1 / size, ring=ring, ends=ends)
    if wire is None and not ring:
        assert torch.equal(results[0], ordered_sum(data, 1 / size))
    for result in results:
        assert torch.equal(result, results[0])
        assert_rounded(result, ordered_sum(data, 1 / size), data, wire or torch.float32, 2 * size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ring_agrees_within_rounding_and_repeats_to_the_bit(dtype: torch.dtype, size: int) -> None:
    data = values(size, size * 101, dtype)
    first, second = (reduce_all(size, data, SPLIT, ring=True) for _ in range(2))
    for result, again in zip(first, second, strict=True):
        assert_rounded(result, ordered_sum(data), data, dtype, size)
        assert torch.equal(result, first[0]) and torch.equal(result, again)


@pytest.mark.parametrize("ring", [False, True], ids=["direct", "ring"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_scales_apply_before_and_after_the_sum(size: int, ring: bool) -> None:
    data = values(size, size * 33, torch.float32)
    expected = ordered_sum([part * 0.5 for part in data], 1 / 3)
    for result in reduce_all(size, data, SPLIT, scale=1 / 3, prescale=0.5, ring=ring):
        assert_rounded(result, expected, data, torch.float32, size + 2)


def test_integer_sums_are_scaled_towards_zero() -> None:
    data = [torch.tensor([7, -7, 0, 1], dtype=torch.int64), torch.tensor([0, 0, 0, 0], dtype=torch.int64)]
    for result in reduce_all(2, data, SPLIT, scale=0.5):
        assert result.tolist() == [3, -3, 0, 0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wire", HALVES, ids=str)
def test_compressed_gradients_are_rounded_once_on_each_way(
    wire: torch.dtype, dtype: torch.dtype, size: int
) -> None:
    data = values(size, size * 51, dtype)
    total = sum((part.to(wire).to(dtype) for part in data[1:]), data[0].to(wire).to(dtype)) / size
    expected = total.to(wire).to(dtype)
    for result in reduce_all(size, data, SPLIT, wire=wire, scale=1 / size):
        torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(wire).eps, atol=0)


@pytest.mark.parametrize("wire", HALVES, ids=str)
def test_half_conversions_are_those_of_torch(wire: torch.dtype) -> None:
    every_half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(wire).float()
    between = torch.linspace(-70000, 70000, 9999)
    tiny = torch.linspace(-1e-4, 1e-4, 9999)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65519.9, 65520.0, 1e-8, 3e38]
    )
    numbers = torch.cat([every_half, between, tiny, special])
    numbers = torch.cat([numbers, numbers.new_zeros(-numbers.numel() % 2)])
    data = [numbers, torch.zeros_like(numbers)]
    expected = (numbers.to(wire).float() + 0.0).to(wire).float()
    for result in reduce_all(2, data, SPLIT, wire=wire):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_parameters_are_gathered_as_they_are_while_gradients_stay_sharded() -> None:
    size, count = 3, 3 * 17
    data = values(size, count, torch.float32)
    total = ordered_sum(data)

    def one(engine: Engine, rank: int) -> torch.Tensor:
        gradients, parameters = data[rank].clone(), torch.zeros(count, dtype=torch.float64)
        bucket = engine.add_bucket(gradients, gather=parameters, wire_dtype=torch.bfloat16, needs_update=True)
        engine.install([("RS", bucket), ("AG", bucket)])
        engine.begin_step()
        engine.mark_ready(bucket)
        engine.wait_rs(bucket)
        assert not engine.ag_done(bucket)
        mine = slice(rank * count // size, (rank + 1) * count // size)
        assert_rounded(gradients[mine], total[mine], [part[mine] for part in data], torch.bfloat16, size)
        parameters[mine] = torch.arange(count, dtype=torch.float64)[mine] / 3
        engine.mark_updated(bucket)
        engine.wait_ag(bucket)
        return parameters

    with local_engines(size) as engines:
        for parameters in on_ranks(size, lambda rank: one(engines[rank], rank)):
            assert torch.equal(parameters, torch.arange(count, dtype=torch.float64) / 3)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[int], Plan, list[int], int]:
    """Ranks, each bucket's elements per rank, a valid plan, the order of the marks, a seed for delays."""
    size = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    scatters = draw(st.permutations(range(len(lengths))))
    plan: Plan = [("RS", bucket) for bucket in scatters]
    for bucket in draw(st.permutations(range(len(lengths)))):
        after = plan.index(("RS", bucket)) + 1
        if draw(st.booleans()):
            plan[after - 1] = ("AR", bucket)
        else:
            plan.insert(draw(st.integers(after, len(plan))), ("AG", bucket))
    return size, lengths, plan, draw(st.permutations(range(len(lengths)))), draw(st.integers(1, 1 << 30))


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_cut_plan_order_and_delay_gives_the_same_bits(
    job: tuple[int, list[int], Plan, list[int], int], dtype: torch.dtype
) -> None:
    size, lengths, plan, marks, seed = job
    data = values(size, sum(lengths) * size, dtype, seed)
    expected = ordered_sum(data, 1 / size)

    def one(engine: Engine, rank: int) -> torch.Tensor:
        whole = data[rank].clone()
        parts = whole.split([length * size for length in lengths])
        buckets = [engine.add_bucket(part, postscale=1 / size, name=str(i)) for i, part in enumerate(parts)]
        engine.install([(op, buckets[i]) for op, i in plan])
        pauses = random.Random(seed + rank)
        engine.begin_step()
        for i in marks:
            time.sleep(pauses.random() / 1000)
            engine.mark_ready(buckets[i])
        engine.wait_all()
        return whole

    with local_engines(size) as engines:
        for result in on_ranks(size, lambda rank: one(engines[rank], rank)):
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
