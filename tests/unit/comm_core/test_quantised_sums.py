"""Buckets that travel in blocks of int8 or fp8: bits, residuals, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import Engine, EngineError, PythonTransport
from tests.support.engines import local_engines, on_ranks, run_step
from tests.support.quantised import BLOCK, LARGEST, WIRES, Floats, exchanged, sums_of_hosts
from tests.support.two_tiers import tier_engines

SEGMENT = 2 * (BLOCK + 4)
OF_HOSTS = 4 * BLOCK  # bytes of a segment in two tiers
PLANS = [[("RS", 0), ("AG", 0)], [("AR", 0)]]
codes = pytest.mark.parametrize("code", WIRES)


def engines(size: int, ring: bool = False) -> AbstractContextManager[list[Engine]]:
    """Engines whose segments hold two blocks."""
    return local_engines(size, segment_bytes=SEGMENT, ring=ring)


def steps_of(
    data: Sequence[Sequence[Floats]],
    ends: Sequence[int],
    scale: float = 1.0,
    prescale: float = 1.0,
    plan: Sequence[tuple[str, int]] = PLANS[0],
    *,
    code: str,
    hosts: Sequence[int] = (),
) -> list[tuple[list[Floats], Floats, Floats]]:
    """Every rank's results of some steps (``data`` by step and rank) and its residuals of gradients, sums."""
    size = len(data[0])

    def one(engine: Engine, rank: int) -> tuple[list[Floats], Floats, Floats]:
        buffer = torch.zeros(ends[-1])
        sent, sums = torch.zeros(ends[-1]), torch.zeros(ends[rank] - ([0, *ends][rank]))
        engine.add_bucket(
            buffer,
            wire_dtype=WIRES[code],
            prescale=prescale,
            postscale=scale,
            ends=ends,
            sent_residual=sent,
            sum_residual=sums,
        )
        engine.install(plan)
        results = []
        for step in data:
            buffer.copy_(torch.from_numpy(step[rank]))
            run_step(engine, [0])
            results.append(buffer.numpy().copy())
        return results, sent.numpy(), sums.numpy()

    with tier_engines(hosts, segment_bytes=OF_HOSTS) if hosts else engines(size) as started:
        return on_ranks(size, lambda rank: one(started[rank], rank))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[Floats]], list[int], int]:
    """Gradients by step and rank, whose magnitudes differ from block to block, and where parts end."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 7, 255, 256, 257, 700, 1100]), min_size=2, max_size=4))
    if not any(lengths):
        lengths[-1] = 3
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, (low, high) = sum(lengths), draw(st.sampled_from([(-3, 3), (-44, 30), (-20, -20)]))
    blocks = np.repeat(10.0 ** dice.uniform(low, high, count // 64 + 1), 64)[:count]
    data = [
        [(dice.standard_normal(count) * blocks).astype(np.float32) for _ in lengths]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return data, list(accumulate(lengths)), draw(st.integers(0, 1))


@codes
@settings(max_examples=60, deadline=None)
@given(job=jobs(), scale=st.sampled_from([1.0, 0.5, 1 / 3]), prescale=st.sampled_from([1.0, 0.7]))
def test_every_rank_gets_the_bits_of_the_oracle(
    code: str, job: tuple[list[list[Floats]], list[int], int], scale: float, prescale: float
) -> None:
    data, ends, plan = job
    sent, sums = [np.zeros_like(mine) for mine in data[0]], np.zeros_like(data[0][0])
    expected = [exchanged(step, sent, sums, ends, scale, prescale, code=code) for step in data]
    found = steps_of(data, ends, scale, prescale, PLANS[plan], code=code)
    for rank, (results, my_sent, my_sums) in enumerate(found):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
        np.testing.assert_array_equal(my_sent, sent[rank])
        np.testing.assert_array_equal(my_sums, sums[([0, *ends])[rank] : ends[rank]])


def numbered(places: Sequence[int]) -> list[int]:
    """Hosts without gaps."""
    return [sorted(set(places)).index(place) for place in places]


@codes
@settings(max_examples=60, deadline=None)
@given(
    job=jobs(),
    places=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    scale=st.sampled_from([1.0, 1 / 3]),
    prescale=st.sampled_from([1.0, 0.7]),
)
def test_sums_of_hosts_are_quantised_between_hosts(
    code: str,
    job: tuple[list[list[Floats]], list[int], int],
    places: list[int],
    scale: float,
    prescale: float,
) -> None:
    data, ends, plan = job
    hosts = numbered(places[: len(ends)])
    senders = len(set(hosts)) if len(set(hosts)) > 1 else len(hosts)
    sent, sums = [np.zeros_like(data[0][0]) for _ in range(senders)], np.zeros_like(data[0][0])
    expected = [exchanged(step, sent, sums, ends, scale, prescale, code=code, hosts=hosts) for step in data]
    found = steps_of(data, ends, scale, prescale, PLANS[plan], code=code, hosts=hosts)
    for rank, (results, _, my_sums) in enumerate(found):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
        np.testing.assert_array_equal(my_sums, sums[([0, *ends])[rank] : ends[rank]])
    held = [mine for _, mine, _ in found]
    for of_host, wanted in zip(sums_of_hosts(held, hosts), sent, strict=True):
        np.testing.assert_array_equal(of_host, wanted)


@codes
@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 0, 0, 0, 1, 1], [1, 0, 2, 1, 1, 0], [0, 1, 2]], ids=str)
def test_a_host_keeps_its_residual_when_its_shards_change(code: str, hosts: list[int]) -> None:
    """It lies anywhere at first, as from a checkpoint of other hosts; later, with deputies of old shards."""
    size, blocks, dice = len(hosts), 9 * len(hosts), np.random.default_rng(1)
    count = blocks * BLOCK
    cuts = [sorted(dice.choice(blocks, size - 1).tolist()) for _ in range(3)]
    layouts = [[*(cut * BLOCK for cut in each), count] for each in cuts]
    random = [torch.from_numpy(dice.standard_normal(count).astype(np.float32)) for _ in range(2 * size)]
    sent, data = random[:size], [part.numpy() for part in random[size:]]
    lost = sums_of_hosts([mine.numpy().copy() for mine in sent], hosts)
    sums = torch.zeros(count)
    by_sums = sums.numpy().copy()

    with tier_engines(hosts, segment_bytes=OF_HOSTS, depth=3) as engines:

        def two_steps(rank: int, ends: list[int]) -> torch.Tensor:
            engine, buffer = engines[rank], torch.empty(count)
            engine.clear_buckets()
            mine = sums[([0, *ends])[rank] : ends[rank]]
            engine.add_bucket(
                buffer,
                wire_dtype=WIRES[code],
                postscale=0.5,
                ends=ends,
                sent_residual=sent[rank],
                sum_residual=mine,
            )
            engine.install(PLANS[0])
            for _ in range(2):
                buffer.copy_(torch.from_numpy(data[rank]))
                run_step(engine, [0])
            return buffer

        for ends in layouts:
            for _ in range(2):
                expected = exchanged(data, lost, by_sums, [count], 0.5, code=code, hosts=hosts)
            for result in on_ranks(size, lambda rank, ends=ends: two_steps(rank, ends)):
                np.testing.assert_array_equal(result.numpy(), expected)
            np.testing.assert_array_equal(sums.numpy(), by_sums)
            held = [mine.numpy() for mine in sent]
            for of_host, wanted in zip(sums_of_hosts(held, hosts), lost, strict=True):
                np.testing.assert_array_equal(of_host, wanted)
            for host in set(hosts):  # one rank of each host holds an element's
                mine = [part != 0 for part, of in zip(held, hosts, strict=True) if of == host]
                assert np.sum(mine, axis=0).max() == 1


@codes
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]], ids=str)
def test_bytes_that_leave_a_host_are_those_of_one_rank_a_host(code: str, hosts: list[int]) -> None:
    """The ranks of a host own as much as those of another."""
    number, count = len(set(hosts)), 12 * 2 * BLOCK
    shares = [count // number // hosts.count(host) for host in hosts]

    def one(engine: Engine) -> int:
        engine.add_bucket(torch.ones(count), wire_dtype=WIRES[code], ends=list(accumulate(shares)))
        engine.install(PLANS[0])
        run_step(engine, [0])
        return int(engine.events()["bytes"].sum())

    with tier_engines(hosts, segment_bytes=OF_HOSTS) as started:
        sent = on_ranks(len(hosts), lambda rank: one(started[rank]))
    for host in range(number):
        of_host = sum(bytes_ for bytes_, of in zip(sent, hosts, strict=True) if of == host)
        assert of_host == 2 * (number - 1) * count * (BLOCK + 4) / BLOCK / number


@codes
@pytest.mark.parametrize("size", [2, 3])
def test_sent_plus_residual_is_the_accumulated_gradient_exactly(size: int, code: str) -> None:
    """One element of each block is a multiple of the largest code in every step, so that all scales are whole
    and all losses have few digits.
    """
    dice, count = np.random.default_rng(0), size * 3 * BLOCK
    data = [[dice.integers(-1000, 1001, count).astype(np.float32) for _ in range(size)] for _ in range(7)]
    for step in data:
        for mine in step:
            mine[::BLOCK] = LARGEST[code] * {"int8": 8, "fp8": 4}[code]
    found = steps_of(data, [count // size * (rank + 1) for rank in range(size)], code=code)
    accumulated = np.sum(data, axis=(0, 1), dtype=np.float64)
    delivered = np.sum(found[0][0], axis=0, dtype=np.float64)
    sent = np.sum([rank[1] for rank in found], axis=0, dtype=np.float64)
    sums = np.concatenate([rank[2] for rank in found])
    assert sent.any() and sums.any(), "nothing was rounded, so nothing was tested"
    np.testing.assert_array_equal(delivered + sent + sums, accumulated)


@codes
def test_a_block_with_infinity_or_nan_arrives_as_nan_and_keeps_its_residual(code: str) -> None:
    count = 6 * BLOCK
    whole = [np.linspace(-1, 1, count, dtype=np.float32) for _ in range(2)]
    broken = [mine.copy() for mine in whole]
    broken[0][10], broken[1][4 * BLOCK] = np.inf, np.nan
    for mine in (*whole, *broken):
        mine[3] = mine[4 * BLOCK + 3] = 0  # as in the padding of a bucket
    ends = [count // 2, count]
    first = steps_of([whole], ends, code=code)
    both = steps_of([whole, broken], ends, code=code)
    for rank, (results, sent, sums) in enumerate(both):
        bad = np.isnan(results[1]).reshape(6, BLOCK)
        assert bad[[0, 4]].sum() == 2 * (BLOCK - 1) and not bad[[1, 2, 3, 5]].any()
        assert not bad[:, 3].any()
        assert np.isfinite(sent).all() and np.isfinite(sums).all()
        hit = slice(0, BLOCK) if rank == 0 else slice(4 * BLOCK, 5 * BLOCK)
        np.testing.assert_array_equal(sent[hit], first[rank][1][hit])
        own = slice(0, BLOCK) if rank == 0 else slice(BLOCK, 2 * BLOCK)
        np.testing.assert_array_equal(sums[own], first[rank][2][own])


@codes
def test_gathered_parameters_travel_as_they_are_and_sums_are_not_rounded(code: str) -> None:
    size, count = 2, 2 * 700
    data = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(size)]
    expected = exchanged(data, [np.zeros_like(mine) for mine in data], None, [700, 1400], 1.0, code=code)

    def one(engine: Engine, rank: int) -> tuple[torch.Tensor, list[int]]:
        gradients, parameters = torch.from_numpy(data[rank].copy()), torch.zeros(count)
        engine.add_bucket(gradients, gather=parameters, wire_dtype=WIRES[code], needs_update=True)
        engine.install([("RS", 0), ("AG", 0)])
        engine.begin_step()
        engine.mark_ready(0)
        engine.wait_rs(0)
        mine = slice(rank * 700, rank * 700 + 700)
        parameters[mine] = gradients[mine]
        engine.mark_updated(0)
        engine.wait_ag(0)
        engine.wait_all()
        return parameters, engine.events()["bytes"].tolist()

    with engines(size) as started:
        for parameters, sent in on_ranks(size, lambda rank: one(started[rank], rank)):
            np.testing.assert_array_equal(parameters.numpy(), expected)
            assert sent == [700 + 3 * 4, 700 * 4]


@codes
def test_bytes_are_a_quarter_and_a_sixtyfourth(code: str) -> None:
    count = 2 * 64 * BLOCK

    def one(engine: Engine, rank: int) -> int:
        engine.add_bucket(torch.ones(count), wire_dtype=WIRES[code])
        engine.install([("RS", 0), ("AG", 0)])
        run_step(engine, [0])
        return int(engine.events()["bytes"].sum())

    with engines(2) as started:
        for sent in on_ranks(2, lambda rank: one(started[rank], rank)):
            assert sent == count * (BLOCK + 4) / BLOCK and sent < 0.27 * 4 * count


class Nothing:
    rank, size = 0, 1


@codes
def test_what_is_refused(code: str) -> None:
    def refused(engine: Engine, dtype: torch.dtype = torch.float32, **options: torch.Tensor) -> str:
        with pytest.raises(EngineError) as caught:
            engine.add_bucket(torch.zeros(4, dtype=dtype), wire_dtype=WIRES[code], name="w", **options)
        return str(caught.value)

    with engines(1, ring=True) as (ring,):
        assert f"bucket 'w' cannot travel in blocks of {code} over a ring" in refused(ring)
    python = Engine(PythonTransport(Nothing()), 0, 1)
    assert "over a Python transport; use the direct exchange" in refused(python)
    python.close()
    with local_engines(1) as (small,):
        assert "segment_bytes must hold a block of 260 bytes" in refused(small)
    with tier_engines([0, 1]) as (small, _):
        assert "segment_bytes must be a multiple of 1024" in refused(small)
    with engines(1) as (direct,):
        assert f"a bucket of float64 cannot travel as blocks of {code}" in refused(direct, torch.float64)
        text = refused(direct, sent_residual=torch.zeros(3))
        assert "the residual of gradients of bucket 'w' must be 4 elements of float32" in text
        assert "but has 4 of Double" in refused(direct, sum_residual=torch.zeros(4, dtype=torch.float64))
        with pytest.raises(EngineError, match="the engine moves float32"):
            direct.add_bucket(torch.zeros(4, dtype=WIRES[code]))
