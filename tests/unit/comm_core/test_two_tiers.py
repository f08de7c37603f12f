"""The exchange in two tiers, with threads as ranks: boards inside a host, sockets between hosts."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import (
    Engine,
    EngineError,
    NotShared,
    Traffic,
    TwoTierTransport,
    alias_of,
    boards,
    changed_rows,
    link_gate,
    local_channels,
    open_boards,
    two_tier_transport,
)
from tests.support.engines import local_engines, on_ranks, run_step
from tests.support.two_tiers import is_shared, tier_engines, tier_gathered, tier_sum, tier_transports

LONG = 3600.0  # seconds that no test waits
PLACES = {
    "2x2": [0, 0, 1, 1],
    "2x4": [0, 0, 0, 0, 1, 1, 1, 1],
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "3+1": [0, 0, 0, 1],
    "1+3": [0, 1, 1, 1],
    "4+2": [0, 0, 0, 0, 1, 1],
    "interleaved": [0, 1, 0, 1],
    "mixed": [1, 0, 2, 1, 1, 0],
    "1x2": [0, 0],
    "one host": [0, 0, 0],
    "1x4": [0, 0, 0, 0],
    "one rank a host": [0, 1, 2],
    "alone": [0],
}
TYPES = [
    (torch.float32, None),
    (torch.float64, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.int64, None),
]


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def uneven_ends(size: int, count: int) -> list[int]:
    """Ends of parts of which some are empty and others long."""
    dice = random.Random(size)
    return [*sorted(dice.choice([0, count, dice.randrange(count + 1)]) for _ in range(size - 1)), count]


def reduced(
    hosts: Sequence[int],
    data: Sequence[torch.Tensor],
    steps: int = 1,
    segment_bytes: int = 64,
    depth: int = 2,
    **options: object,
) -> list[torch.Tensor]:
    """Every rank's bucket after these steps; before each, it holds the rank's own values."""
    with tier_engines(hosts, segment_bytes=segment_bytes, depth=depth) as engines:

        def one(rank: int) -> torch.Tensor:
            mine = torch.empty_like(data[rank])
            engines[rank].add_bucket(mine, name="weights", **options)
            engines[rank].install([("RS", 0), ("AG", 0)])
            for _ in range(steps):
                mine.copy_(data[rank])
                run_step(engines[rank], [0])
            return mine

        return on_ranks(len(hosts), one)


def failure(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def assert_all_equal(results: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


# -- buckets in memory that ranks share ----------------------------------------------------------------------

WHERE = {"all": lambda rank: True, "some": lambda rank: rank != 1, "none": lambda rank: False}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", ["1x2", "one host", "1x4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_shared_buckets_have_the_bits_of_rank_order(where: str, place: str, dtype: torch.dtype) -> None:
    hosts = PLACES[place]
    size, after = len(hosts), 1.0 if dtype == torch.int64 else 1 / 3
    transports, ends = tier_transports(hosts), uneven_ends(size, 997)
    engines = [Engine(each, rank, size) for rank, each in enumerate(transports)]
    steps = [[values(rank, 997, dtype, seed=step) for rank in range(size)] for step in range(4)]

    def one(rank: int) -> list[torch.Tensor]:
        mine = transports[rank].zeros(997, dtype) if WHERE[where](rank) else torch.zeros(997, dtype=dtype)
        assert is_shared(mine) == WHERE[where](rank)
        engines[rank].add_bucket(mine, ends=ends, postscale=after)
        sums = []
        for plan in ([("RS", 0), ("AG", 0)], [("AR", 0)]):
            engines[rank].wait_all()
            engines[rank].install(plan)
            for data in steps:
                mine.copy_(data[rank])
                run_step(engines[rank], [0])
                sums.append(mine.clone())
        return sums

    results = on_ranks(size, one)
    for engine in engines:
        engine.close()
    expected = [tier_sum(data, hosts, after=after) for data in [*steps, *steps]]
    for sums in results:
        assert_all_equal([torch.stack(sums)], torch.stack(expected))


def test_a_shared_bucket_is_not_overwritten_before_neighbours_have_read_it() -> None:
    """Rank 0 owns everything and sums for long, and in AG the others copy for long."""
    transports, count = tier_transports([0, 0, 0], 1 << 16, timeout=30.0), 1 << 22
    ends = [count] * 3

    def one(rank: int) -> None:
        mine = transports[rank].zeros(count, torch.float32)
        for _ in range(3):
            mine.fill_(rank + 1)
            transports[rank].reduce_scatter(mine, ends=ends)
            assert rank > 0 or bool((mine == 6).all())
            mine.fill_(6 if rank == 0 else torch.nan)
            transports[rank].all_gather(mine, ends=ends)
            assert bool((mine == 6).all())
            mine.fill_(torch.nan)

    on_ranks(3, one)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_what_a_rank_that_gave_up_writes_is_no_result(operation: str) -> None:
    """The reader waits at the gate, between two segments, while the other rank is through and gives up."""
    transports, count = tier_transports([0, 0], 1 << 16), 1 << 16
    reader = 0 if operation == "reduce_scatter" else 1
    buckets = [each.zeros(count, torch.float32).fill_(1) for each in transports]
    gate = link_gate()
    halo = gate.begin(Traffic.halo, 1, LONG)
    failures: list[EngineError] = []

    def one(rank: int) -> None:
        try:
            getattr(transports[rank], operation)(buckets[rank], ends=[count, count])
        except EngineError as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    try:
        for thread in threads:
            thread.start()
        threads[1 - reader].join(0.5)
        transports[1 - reader].abort("out of memory")
        threads[1 - reader].join()
        buckets[1 - reader].fill_(torch.nan)
    finally:
        gate.end(halo)
    threads[reader].join()
    assert len(failures) == 2, failures
    assert f"rank {1 - reader}" in str(failures[1]) and "out of memory" in str(failures[1]), failures


def test_shared_memory_is_given_back_as_zeros_and_outlives_its_transport() -> None:
    transport = tier_transports([0, 0])[0]
    first, second = (transport.zeros(5000, torch.float32).fill_(7) for _ in range(2))
    place = first.data_ptr()
    del first
    again = transport.zeros(4000, torch.float32)
    assert again.data_ptr() == place and not again.any() and bool((second == 7).all())
    transport.close()
    assert bool((second == 7).all()) and is_shared(second)
    with pytest.raises(EngineError, match="closed"):
        transport.zeros(1, torch.float32)


def test_a_forked_child_has_gradients_of_its_own() -> None:
    mine = tier_transports([0, 0])[0].zeros(5000, torch.float32).fill_(7)
    child = os.fork()
    if child == 0:
        was = bool((mine == 7).all())
        mine.fill_(8)
        os._exit(int(not was or not bool((mine == 8).all())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((mine == 7).all())


def test_a_child_of_a_forked_child_keeps_its_files_and_gradients() -> None:
    """The child's files have the numbers that those of its parent's gradients had."""
    mine = tier_transports([0, 0])[0].zeros(5000, torch.float32).fill_(7)
    child = os.fork()
    if child == 0:
        files = [os.open(os.devnull, os.O_RDWR) for _ in range(20)]
        grandchild = os.fork()
        if grandchild == 0:
            try:
                os._exit(int(any(os.write(file, b"x") != 1 for file in files) or not bool((mine == 7).all())))
            except OSError:
                os._exit(2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) % 256)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((mine == 7).all())


def test_a_gradient_in_shared_memory_can_be_resized_like_torchs_own() -> None:
    flat = tier_transports([0, 0])[0].zeros(5000, torch.float32).fill_(7)
    alias = alias_of(flat, 0, [2, 3], [3, 1])
    alias.resize_(10, 10)  # more than its bytes: torch moves it to other memory
    assert alias.flatten()[:6].tolist() == [7] * 6
    alias.fill_(0)
    assert bool((flat == 7).all())


def test_ranks_that_cannot_share_gradients_use_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = boards._open_neighbour

    def refuse(files: dict[int, int], rank: int, other: int, *rest: Any) -> str:
        if rank == 1 and rest[-1] == "commsched gradients":
            return "no more room for mappings"
        return honest(files, rank, other, *rest)

    monkeypatch.setattr(boards, "_open_neighbour", refuse)
    transports = tier_transports([0, 0, 0])
    buckets = [each.zeros(999, torch.float32).fill_(rank) for rank, each in enumerate(transports)]
    assert not any(map(is_shared, buckets))
    on_ranks(3, lambda rank: transports[rank].all_reduce(buckets[rank]))
    assert_all_equal(buckets, torch.full((999,), 3.0))


def test_a_rank_that_cannot_map_the_gradients_of_others_uses_boards_with_them() -> None:
    channels, hosts = local_channels(2), [0, 0]
    size = TwoTierTransport.board_bytes(2, 64, 2)

    def one(rank: int) -> torch.Tensor:
        with open_boards(channels[rank], rank, hosts, size) as files:
            with open_boards(channels[rank], rank, hosts, 1 << 20, name="commsched gradients") as memory:
                memory = [os.open(os.devnull, os.O_RDONLY)] * 2 if rank == 1 else memory
                transport = TwoTierTransport(channels[rank], rank, hosts, files, 64, 2, memory)
        mine = transport.zeros(1000, torch.float32).fill_(rank + 1)
        assert is_shared(mine) == (rank == 0)
        transport.all_reduce(mine)
        return mine

    assert_all_equal(on_ranks(2, one), torch.full((1000,), 3.0))


# -- sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "wire"), TYPES)
def test_sums_have_the_bits_of_the_documented_order(
    place: str, dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    hosts = PLACES[place]
    data = [values(rank, len(hosts) * 301, dtype) for rank in range(len(hosts))]
    after = 1.0 if dtype == torch.int64 else 1 / 3
    expected = tier_gathered(tier_sum(data, hosts, wire, after=after), hosts, wire)
    assert_all_equal(reduced(hosts, data, steps=3, wire_dtype=wire, postscale=after), expected)


@pytest.mark.parametrize(("dtype", "wire"), [(torch.float16, None), (torch.float32, torch.float16)])
def test_the_sum_of_a_host_is_finite_in_float16_where_the_mean_is(
    dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    data = [torch.full((8 * 9,), 20000.0, dtype=dtype) for _ in range(8)]
    assert_all_equal(reduced(PLACES["2x4"], data, wire_dtype=wire, postscale=1 / 8), data[0])


@pytest.mark.parametrize("place", ["2x2", "3+1", "mixed", "1x2", "1x4"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_uneven_parts_and_a_prescale(place: str, wire: torch.dtype | None) -> None:
    hosts = PLACES[place]
    data = [values(rank, 997, torch.float32, seed=1) for rank in range(len(hosts))]
    expected = tier_gathered(tier_sum(data, hosts, wire, before=0.3, after=0.7), hosts, wire)
    options = {"ends": uneven_ends(len(hosts), 997), "prescale": 0.3, "postscale": 0.7}
    assert_all_equal(reduced(hosts, data, steps=2, wire_dtype=wire, **options), expected)


@pytest.mark.parametrize(("segment_bytes", "depth"), [(8, 1), (24, 3), (256, 5), (1 << 16, 4)])
def test_segments_and_depth_change_no_bit(segment_bytes: int, depth: int) -> None:
    hosts = PLACES["4+2"]
    data = [values(rank, 6 * 211, torch.float32, seed=2) for rank in range(6)]
    results = reduced(hosts, data, steps=3, segment_bytes=segment_bytes, depth=depth)
    assert_all_equal(results, tier_sum(data, hosts))


ROUNDED = [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("place", "wire"),
    [
        *((place, wire) for place in ("1x2", "one host", "1x4", "one rank a host") for wire in ROUNDED),
        *((place, code) for place in ("1x2", "1x4") for code in (torch.int8, torch.float8_e4m3fn)),
    ],
)
def test_one_tier_gives_the_bits_of_the_direct_exchange(place: str, wire: torch.dtype | None) -> None:
    """In several segments, with uneven parts and, of blocks, what rounding has lost in each step."""
    hosts, steps = PLACES[place], 3
    size, count, by_blocks = len(hosts), 4000, wire not in ROUNDED
    data = [values(rank, count, torch.float32, seed=3) for rank in range(size)]
    ends = [count // 7 // 256 * 256 * rank for rank in range(1, size)] + [count]

    def steps_of(engine: Engine, rank: int) -> list[torch.Tensor]:
        mine = data[rank].clone()
        own = ends[rank] - (ends[rank - 1] if rank else 0)
        lost = [torch.zeros(n) for n in (count, own)] if by_blocks else []
        options = dict(zip(("sent_residual", "sum_residual"), lost, strict=False))
        engine.add_bucket(mine, wire_dtype=wire, postscale=0.3, prescale=0.9, ends=ends, **options)
        engine.install([("RS", 0), ("AG", 0)])
        for _ in range(steps):
            mine.copy_(data[rank])
            run_step(engine, [0])
        return [mine, *lost]

    with local_engines(size, segment_bytes=600) as engines:
        expected = on_ranks(size, lambda rank: steps_of(engines[rank], rank))
    with tier_engines(hosts, segment_bytes=600) as engines:
        results = on_ranks(size, lambda rank: steps_of(engines[rank], rank))
    for mine, theirs in zip(results, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
    if wire is None:
        assert_all_equal([result[0] for result in results], tier_sum(data, hosts, None, 0.9, 0.3))


def test_who_owns_a_shard_changes_no_bit() -> None:
    hosts = PLACES["3+1"]
    data = [values(rank, 4 * 50, torch.bfloat16, seed=5) for rank in range(4)]
    for owner in range(4):
        ends = [0] * owner + [200] * (4 - owner)
        assert_all_equal(reduced(hosts, data, ends=ends), tier_sum(data, hosts))


@pytest.mark.parametrize("place", ["2x2", "4+2", "interleaved", "one host"])
def test_parameters_are_gathered_after_their_update(place: str) -> None:
    """AG waits for the update of the shard, and moves parameters of another type as they are."""
    hosts = PLACES[place]
    size, count = len(hosts), 503
    data = [values(rank, count, torch.float32, seed=6) for rank in range(size)]
    total, ends = tier_sum(data, hosts, torch.bfloat16), uneven_ends(size, count)
    begins = [0, *ends[:-1]]
    with tier_engines(hosts) as engines:

        def one(rank: int) -> torch.Tensor:
            grads, params = torch.empty(count), torch.zeros(count, dtype=torch.float64)
            own = slice(begins[rank], ends[rank])
            engines[rank].add_bucket(
                grads, gather=params, wire_dtype=torch.bfloat16, needs_update=True, ends=ends
            )
            engines[rank].install([("RS", 0), ("AG", 0)])
            for step in range(3):
                grads.copy_(data[rank])
                engines[rank].begin_step()
                engines[rank].mark_ready(0)
                engines[rank].wait_rs(0)
                params[own] = grads[own].double() * (1 + step)
                engines[rank].mark_updated(0)
                engines[rank].wait_ag(0)
            return params

        assert_all_equal(on_ranks(size, one), total.double() * 3)


def test_several_buckets_flags_and_whole_reductions_in_one_plan() -> None:
    hosts, plan = PLACES["3+1"], [("RS", 1), ("AR", 2), ("RS", 0), ("AG", 1), ("AG", 0)]
    lengths, kinds = (4 * 77, 4, 4 * 8), (torch.float32, torch.bfloat16, torch.int64)
    data = [
        [values(rank, n, kind, seed=7 + b) for rank in range(4)]
        for b, (n, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]
    with tier_engines(hosts) as engines:

        def one(rank: int) -> list[torch.Tensor]:
            buckets = [torch.empty_like(each[rank]) for each in data]
            for bucket in buckets:
                engines[rank].add_bucket(bucket)
            engines[rank].install(plan)
            for _ in range(4):
                for bucket, each in zip(buckets, data, strict=True):
                    bucket.copy_(each[rank])
                run_step(engines[rank], [2, 0, 1])
            return buckets

        results = on_ranks(4, one)
    for b, each in enumerate(data):
        assert_all_equal([result[b] for result in results], tier_sum(each, hosts))


@pytest.mark.parametrize("place", ["1x2", "1x4", "2x2", "3+1", "mixed"])
def test_ranks_that_are_late_in_any_order_change_nothing(place: str) -> None:
    """Ranks mark buckets at random times and in random order: no slot is read early or overwritten."""
    hosts = PLACES[place]
    size, steps = len(hosts), 12
    data = [
        [[values(rank, size * 61, torch.float32, seed=100 * b + s) for rank in range(size)] for s in range(3)]
        for b in range(3)
    ]
    sums = [[tier_sum(ranks, hosts) for ranks in each] for each in data]
    with tier_engines(hosts, depth=3) as engines:

        def one(rank: int) -> None:
            dice, engine = random.Random(rank), engines[rank]
            buckets = [torch.empty(size * 61) for _ in data]
            for bucket in buckets:
                engine.add_bucket(bucket)
            engine.install([("RS", 0), ("RS", 1), ("AG", 1), ("RS", 2), ("AG", 0), ("AG", 2)])
            for step in range(steps):
                engine.begin_step()
                for b in dice.sample(range(3), 3):
                    buckets[b].copy_(data[b][step % 3][rank])
                    threading.Event().wait(dice.choice([0, 0, 0.001, 0.004]))
                    engine.mark_ready(b)
                for b in dice.sample(range(3), 3):
                    engine.wait_ag(b)
                    torch.testing.assert_close(buckets[b], sums[b][step % 3], rtol=0, atol=0)
                engine.wait_all()

        on_ranks(size, one)


# -- touched rows --------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def table(rank: int, rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A table of which a rank has touched no row, a few, or all; rows that many ranks touch come first."""
    dice = random.Random(f"{seed} {rank}")
    count = dice.choice([0, 1, rows // 8, rows // 4, rows])
    touched = dice.sample(range(rows), count) if dice.random() < 0.5 else list(range(count))
    found = torch.zeros(rows, width, dtype=dtype)
    found[touched] = values(rank, rows * width, dtype, seed).view(rows, width)[touched]
    if dtype.is_floating_point and touched:
        found[touched[0]] = -0.0  # touched, though it is zero
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "wire"), TYPES)
def test_rows_have_the_bits_of_whole_buckets(
    place: str, dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    """Rows are not a multiple of the ranks; each step touches others, and must not see the step before."""
    hosts, rows, width, steps = PLACES[place], 53, 9, 4
    size = len(hosts)
    data = [[table(rank, rows, width, dtype, step) for rank in range(size)] for step in range(steps)]
    before, after = (1.0, 1.0) if dtype == torch.int64 else (0.3, 1 / 3)
    if size == 1:
        before, after = 1.0, before * after  # scaled at once
    options = {"row": width, "wire_dtype": wire, "prescale": before, "postscale": after}
    with tier_engines(hosts) as engines:

        def one(rank: int) -> list[torch.Tensor]:
            mine, found = torch.empty(rows, width, dtype=dtype), []
            engines[rank].add_bucket(mine.view(-1), name="table", **options)
            engines[rank].install([("RS", 0), ("AG", 0)])
            for tables in data:
                mine.copy_(tables[rank])
                run_step(engines[rank], [0])
                found.append(mine.clone())
            return found

        results = on_ranks(size, one)
    for step, tables in enumerate(data):
        expected = tier_gathered(tier_sum(tables, hosts, wire, before, after), hosts, wire)
        for result in results:
            assert torch.equal(bits(result[step]), bits(expected)), f"step {step}"


@pytest.mark.parametrize(("segment_bytes", "depth"), [(8, 1), (24, 3), (1 << 16, 4)])
def test_rows_in_other_segments_in_one_operation(segment_bytes: int, depth: int) -> None:
    hosts = PLACES["4+2"]
    data = [table(rank, 40, 5, torch.float32, 7) for rank in range(6)]
    with tier_engines(hosts, segment_bytes=segment_bytes, depth=depth) as engines:

        def one(rank: int) -> torch.Tensor:
            mine = data[rank].clone()
            engines[rank].add_bucket(mine.view(-1), row=5)
            engines[rank].install([("AR", 0)])
            run_step(engines[rank], [0])
            return mine

        assert_all_equal(on_ranks(6, one), tier_sum(data, hosts))


@pytest.mark.parametrize(("dtype", "wire"), [(torch.float16, None), (torch.float32, torch.float16)])
def test_the_sum_of_a_hosts_rows_is_finite_in_float16_where_the_mean_is(
    dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    data = [torch.full((8 * 9,), 20000.0, dtype=dtype) for _ in range(8)]
    assert_all_equal(reduced(PLACES["2x4"], data, wire_dtype=wire, postscale=1 / 8, row=9), data[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("early", [True, False])
def test_corrected_rows_have_the_bits_of_whole_sums(
    place: str, wire: torch.dtype | None, early: bool
) -> None:
    """A part of each gradient is summed, then the rows that any rank has changed since."""
    hosts, rows, width, steps = PLACES[place], 41, 6, 3
    size = len(hosts)
    parts, wholes = [], []
    for step in range(steps):
        parts.append(
            [values(rank, rows * width, torch.float32, step).view(rows, width) for rank in range(size)]
        )
        changes = [table(rank, rows, width, torch.float32, step + 50) for rank in range(size)]
        wholes.append([part + change for part, change in zip(parts[-1], changes, strict=True)])
    options = {"wire_dtype": wire, "postscale": 1 / 3}
    ends = [rows * width] * size
    with tier_engines(hosts) as engines:

        def one(rank: int) -> list[torch.Tensor]:
            engine, sums, again = engines[rank], torch.empty(rows, width), torch.empty(rows, width)
            changed, found = torch.zeros(1 + rows, dtype=torch.int32), []
            engine.add_bucket(sums.view(-1), ends=ends, name="head", **options)
            engine.add_bucket(
                again.view(-1), gather=sums.view(-1), row=width, changed=changed, name="rest", **options
            )
            middle = [("RS", 1), ("AG", 0)] if early else [("AG", 0), ("RS", 1)]
            engine.install([("RS", 0), *middle, ("AG", 1)])
            for part, whole in zip(parts, wholes, strict=True):
                sums.copy_(part[rank])
                again.copy_(whole[rank])
                changed_rows(part[rank], again, changed)
                run_step(engine, [0, 1])
                found.append(sums.clone())
            return found

        results = on_ranks(size, one)
    for step, whole in enumerate(wholes):
        expected = tier_gathered(tier_sum(whole, hosts, wire, after=1 / 3), hosts, wire)
        for result in results:
            assert torch.equal(bits(result[step]), bits(expected)), f"step {step}"


@pytest.mark.parametrize("place", ["2x2", "3+1", "mixed"])
def test_rows_and_whole_buckets_in_turn_with_late_ranks(place: str) -> None:
    """Boards and row messages share the channel: ranks that are late in any order change nothing."""
    hosts, rows, width = PLACES[place], 30, 7
    size = len(hosts)
    tables = [[table(rank, rows, width, torch.float32, step) for rank in range(size)] for step in range(8)]
    dense = [values(rank, size * 61, torch.float32, seed=8) for rank in range(size)]
    total = tier_sum(dense, hosts)
    with tier_engines(hosts, depth=3) as engines:

        def one(rank: int) -> None:
            dice, engine = random.Random(rank), engines[rank]
            sparse, whole = torch.empty(rows, width), torch.empty(size * 61)
            engine.add_bucket(sparse.view(-1), row=width)
            engine.add_bucket(whole)
            engine.install([("RS", 1), ("RS", 0), ("AG", 1), ("AG", 0)])
            for step in tables:
                engine.begin_step()
                sparse.copy_(step[rank])
                whole.copy_(dense[rank])
                for b in dice.sample(range(2), 2):
                    threading.Event().wait(dice.choice([0, 0, 0.001, 0.004]))
                    engine.mark_ready(b)
                engine.wait_all()
                torch.testing.assert_close(sparse, tier_sum(step, hosts), rtol=0, atol=0)
                torch.testing.assert_close(whole, total, rtol=0, atol=0)

        on_ranks(size, one)


# -- what is sent --------------------------------------------------------------------------------------------


def row_message(*counts: int, row_bytes: int) -> int:
    """The bytes of messages with so many rows: a count, numbers up to a multiple of 8 bytes, rows."""
    return sum(8 + -(-4 * n // 8) * 8 + n * row_bytes for n in counts)


def test_rows_that_ranks_of_a_host_touch_leave_it_once() -> None:
    """Row k belongs to rank k % 4. All ranks of the first host touch rows 2, 3 and 4."""
    hosts, width = PLACES["2x2"], 5
    touched = {0: [2, 3, 4], 1: [2, 3, 4], 2: [], 3: [9]}

    def one(rank: int) -> dict[str, int]:
        mine = torch.zeros(12, width)
        mine[touched[rank]] = 1.0
        engines[rank].add_bucket(mine.view(-1), row=width)
        engines[rank].install([("RS", 0), ("AG", 0)])
        run_step(engines[rank], [0])
        assert mine[:, 0].tolist() == [0, 0, 2, 2, 2, 0, 0, 0, 0, 1, 0, 0]
        return {("RS", "AG")[event["op"]]: int(event["bytes"]) for event in engines[rank].events()}

    with tier_engines(hosts) as engines:
        sent = on_ranks(4, one)

    def bytes_of(rows: int) -> int:
        return row_message(rows, row_bytes=4 * width)

    # RS: rank 0 is the deputy for rank 2, rank 1 for rank 3. AG: each rank's rows once to the other host.
    assert [rank["RS"] for rank in sent] == [bytes_of(n) for n in (1, 1, 0, 1)]
    assert [rank["AG"] for rank in sent] == [bytes_of(n) for n in (1, 1, 1, 1)]


def test_numbers_of_changed_rows_cross_between_hosts_once() -> None:
    """Both ranks of the first host change rows 1 and 4: each tells the other host of one of them."""
    hosts, width = PLACES["2x2"], 5
    changes = [[1, 4], [1, 4], [], [6]]

    def one(rank: int) -> tuple[list[int], dict[str, int]]:
        sums, again = torch.zeros(8 * width), torch.ones(8 * width)
        changed = torch.zeros(9, dtype=torch.int32)
        engines[rank].add_bucket(again, gather=sums, row=width, changed=changed)
        engines[rank].install([("RS", 0), ("AG", 0)])
        changed[: 1 + len(changes[rank])] = torch.tensor([len(changes[rank]), *changes[rank]])
        run_step(engines[rank], [0])
        assert sums.view(8, width)[:, 0].tolist() == [0, 4, 0, 0, 4, 0, 4, 0]
        return changed[:4].tolist(), {
            ("RS", "AG")[event["op"]]: int(event["bytes"]) for event in engines[rank].events()
        }

    with tier_engines(hosts) as engines:
        found = on_ranks(4, one)
    assert all(changed == [3, 1, 4, 6] for changed, _ in found)

    def bytes_of(rows: int, width: int = width) -> int:
        return row_message(rows, row_bytes=4 * width)

    # Numbers, then rows to the rank of the same place: rows 1, 4 and 6 belong to ranks 1, 0 and 2.
    assert [sent["RS"] for _, sent in found] == [
        bytes_of(1, 0) + bytes_of(1),
        bytes_of(1, 0) + bytes_of(0),
        bytes_of(1, 0) + bytes_of(1),
        bytes_of(0, 0) + bytes_of(1),
    ]
    assert [sent["AG"] for _, sent in found] == [bytes_of(1), bytes_of(1), bytes_of(1), bytes_of(0)]


@pytest.mark.parametrize("place", ["2x2", "2x4", "4x2", "3+1", "interleaved"])
def test_a_host_sends_what_one_rank_a_host_would(place: str) -> None:
    hosts = PLACES[place]
    size, count = len(hosts), len(hosts) * 100
    number = len(set(hosts))
    with tier_engines(hosts) as engines:

        def one(rank: int) -> int:
            engines[rank].add_bucket(torch.ones(count))
            engines[rank].install([("RS", 0), ("AG", 0)])
            run_step(engines[rank], [0])
            return int(engines[rank].events()["bytes"].sum())

        sent = on_ranks(size, one)
    by_host = [sum(n for n, of in zip(sent, hosts, strict=True) if of == host) for host in range(number)]
    assert sum(by_host) == 2 * (number - 1) * count * 4
    if size == number * hosts.count(0):  # hosts of one size
        assert by_host == [2 * (number - 1) * count * 4 // number] * number


# -- what is refused -----------------------------------------------------------------------------------------


def test_rows_of_parameters_are_refused() -> None:
    with tier_engines([0, 0, 1]) as engines:
        error = failure(
            lambda: engines[0].add_bucket(torch.ones(12), gather=torch.ones(12), row=4, name="table")
        )
        assert "'table' has 3 rows, or gathers parameters" in str(error)


def test_hosts_and_boards_must_fit() -> None:
    channel = local_channels(1)[0]
    size = TwoTierTransport.board_bytes(2, 64, 2)
    assert size == 8192 + 2 * 2 * 2 * 64
    with open_boards(channel, 0, [0], size) as files:
        for hosts, rank, error in (
            ([0], 1, "rank must be in [0, 1)"),
            ([1], 0, "hosts are numbered from 0 to at most 0, but rank 0 is on host 1"),
            ([0, -1], 0, "hosts are numbered from 0 to at most 1, but rank 1 is on host -1"),
            ([1, 1], 0, "hosts are numbered without gaps, but no rank is on host 0 of 2"),
            ([0, 0], 0, "rank 0 needs the boards of the 2 ranks of its host, of which it is number 0"),
        ):
            assert error in str(
                failure(lambda h=hosts, r=rank: TwoTierTransport(channel, r, h, files, 64, 2))
            )
        error = failure(lambda: TwoTierTransport(channel, 0, [0], files, 1 << 20, 4))
        assert f"it has {size} bytes, but {8192 + (8 << 20)} are needed" in str(error)
        for depth, error in (
            (65, "depth must be in [1, 64], but is 65"),
            (125, "notes on 248 slots of each"),
        ):
            size = TwoTierTransport.board_bytes(1, 64, depth)
            with open_boards(channel, 0, [0], size) as large:
                assert error in str(
                    failure(lambda d=depth, f=large: TwoTierTransport(channel, 0, [0], f, 64, d))
                )


@pytest.mark.parametrize(
    ("longer", "dtypes", "steps"),
    [
        (0, (torch.float32, torch.float32), (0, 1)),
        (8, (torch.float32, torch.float32), (0, 0)),  # in as many segments
        (0, (torch.float32, torch.int32), (0, 0)),
    ],
)
def test_different_operations_are_a_mismatch(
    longer: int, dtypes: Sequence[torch.dtype], steps: Sequence[int]
) -> None:
    transports = tier_transports([0, 0])

    def one(rank: int) -> EngineError:
        bucket = torch.ones(2000 + longer * rank, dtype=dtypes[rank])
        try:
            return failure(lambda: transports[rank].all_reduce(bucket, step=steps[rank]))
        finally:
            transports[rank].close()

    errors = on_ranks(2, one)
    told = "do all ranks run the same plan?", "use the same plan on all ranks"
    assert any(each in str(error) for error in errors for each in told)
    assert all(error.kind in ("mismatch", "peer_lost") for error in errors)


# -- boards --------------------------------------------------------------------------------------------------


def mapped_boards() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:commsched board")


def open_files() -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links


def test_closing_gives_the_memory_back() -> None:
    before = mapped_boards()
    transports = tier_transports([0, 0, 1])
    assert mapped_boards() == before + 5
    assert not any("commsched board" in link for link in open_files())
    for transport in transports:
        transport.close()
    assert mapped_boards() == before


@pytest.mark.parametrize(("size", "board"), [(2, 2 << 20), (16, 16 << 20), (20, 16 << 20)])
def test_a_board_of_many_ranks_has_shorter_segments(
    monkeypatch: pytest.MonkeyPatch, size: int, board: int
) -> None:
    """It would grow with the ranks, and with it what the ranks of a host take together with their square."""
    sizes = list[int]()

    def refuse(_: object, rank: int, hosts: Sequence[int], bytes_: int, timeout: float) -> object:
        sizes.append(bytes_)
        raise NotShared("enough", kind="usage", rank=rank)

    monkeypatch.setattr(boards, "open_boards", refuse)
    with pytest.raises(NotShared):
        two_tier_transport(local_channels(1)[0], 0, [0] * size)
    assert 0.99 * board < sizes[0] <= board + 8192


def refused_by(monkeypatch: pytest.MonkeyPatch, name: str, replacement: object, hosts: Sequence[int]) -> str:
    monkeypatch.setattr(boards.os, name, replacement)
    channels = local_channels(len(hosts))

    def one(rank: int) -> str:
        with pytest.raises(NotShared) as caught:
            two_tier_transport(channels[rank], rank, hosts)
        assert caught.value.kind == "usage"
        return str(caught.value)

    texts = on_ranks(len(hosts), one)
    assert len(set(texts)) == 1
    assert not any("commsched board" in link for link in open_files())
    return texts[0]


def test_all_ranks_learn_why_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another host, which could share its memory, gives up too."""

    honest = os.open

    def refuse(path: str, *rest: int) -> int:
        if path.startswith("/proc/"):
            raise PermissionError(1, "Operation not permitted")
        return honest(path, *rest)

    text = refused_by(monkeypatch, "open", refuse, [0, 1, 0])
    assert f"rank 0 (user {os.getuid()}) cannot open the board of rank 2, /proc/{os.getpid()}/fd/" in text
    assert "Operation not permitted; do both run in one container, as the same user?" in text


def test_no_memory_files_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    assert "cannot make a file in memory (memfd_create): " in refused_by(
        monkeypatch, "memfd_create", refuse, [0, 0]
    )


def test_the_board_of_another_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container, the same number is another process."""
    assert "that is the board of another job" in refused_by(
        monkeypatch, "pread", lambda *_: b"another token...", [0, 0]
    )


def test_another_file_of_another_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused_by(monkeypatch, "readlink", lambda _: "/dev/null", [0, 0])
    assert "that is another file (/dev/null); do both run in one container" in text


# -- how it ends ---------------------------------------------------------------------------------------------


def prepared(transport: TwoTierTransport, rank: int, size: int, timeout: float = LONG) -> Engine:
    engine = Engine(transport, rank, size, timeout)
    engine.add_bucket(torch.ones(size * 500), name="weights")
    engine.install([("RS", 0), ("AG", 0)])
    return engine


@pytest.mark.parametrize("place", ["1x2", "one host", "2x2", "3+1", "one rank a host"])
@pytest.mark.parametrize("way", ["abort", "close"])
def test_the_others_hear_which_rank_ended_and_why(place: str, way: str) -> None:
    hosts = PLACES[place]
    size = len(hosts)
    leaver = size - 1
    transports = tier_transports(hosts)

    def one(rank: int) -> EngineError | None:
        engine = prepared(transports[rank], rank, size)
        run_step(engine, [0])
        if rank == leaver:
            engine.abort("its disk is full") if way == "abort" else engine.close()
            return None
        error = failure(lambda: run_step(engine, [0]))
        engine.close()
        return error

    for rank, error in enumerate(on_ranks(size, one)[:-1]):
        assert error is not None and (error.kind, error.peer) == ("peer_lost", leaver), str(error)
        assert f"rank {rank}: " in str(error) and "of bucket 0 (weights) in step 2 failed" in str(error)
        assert ("its disk is full" if way == "abort" else f"rank {leaver}") in str(error)


@pytest.mark.parametrize("place", ["1x2", "one host", "2x2", "interleaved"])
def test_an_abort_ends_waits_for_boards_and_for_messages(place: str) -> None:
    hosts = PLACES[place]
    transports = tier_transports(hosts)
    engines = [prepared(each, rank, len(hosts)) for rank, each in enumerate(transports)]
    waiting = engines[0]
    waiting.begin_step()
    waiting.mark_ready(0)
    threading.Timer(0.05, lambda: waiting.abort("enough")).start()
    error = failure(lambda: waiting.wait_ag(0))
    assert error.kind == "aborted" and "enough" in str(error)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("operation", "place"),
    [
        ("AG", "1x2"),
        ("AG", "3+1"),
        ("RS by rows", "2x2"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("RS", "1x2"),
                ("RS", "one host"),
                ("RS", "2x2"),
                ("RS", "3+1"),
                ("AG", "2x2"),
                ("RS by rows", "3+1"),
            )
        ),
    ],
)
def test_all_time_outs_name_the_rank_that_does_not_come(operation: str, place: str) -> None:
    """Ranks that wait for a rank that itself waits let that one say for whom."""
    hosts = PLACES[place]
    size = len(hosts)
    absent = size - 1
    transports = tier_transports(hosts)
    together, failed = threading.Barrier(size), threading.Semaphore(0)

    def one(rank: int) -> EngineError | None:
        engine = Engine(transports[rank], rank, size, LONG)
        grads, params = torch.ones(size * 50), torch.ones(size * 50)
        by_rows = operation == "RS by rows"
        options = {"row": 50} if by_rows else {"gather": params, "needs_update": True}
        engine.add_bucket(grads, name="weights", **options)
        engine.install([("RS", 0), ("AG", 0)])
        engine.begin_step()
        if operation == "AG":
            engine.mark_ready(0)
            engine.wait_rs(0)
        transports[rank].set_timeout(5.0)
        together.wait()
        if rank == absent:
            assert all(failed.acquire(timeout=LONG) for _ in range(size - 1))
            engine.close()
            return None
        if operation != "AG":
            engine.mark_ready(0)
            error = failure(lambda: engine.wait_rs(0))
        else:
            engine.mark_updated(0)
            error = failure(lambda: engine.wait_ag(0))
        failed.release()
        engine.close()
        return error

    for error in on_ranks(size, one)[:-1]:
        assert error is not None and error.peer == absent, str(error)
        assert f"{operation[:2]} of bucket 0 (weights) in step 1 failed" in str(error)
        assert f"nothing came from rank {absent}" in str(error), str(error)


# -- forks ---------------------------------------------------------------------------------------------------


def in_child(call: Callable[[], bool]) -> bool:
    """Whether the call returns True in a forked child, which then ends without clean-up."""
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = call()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_has_no_board_and_harms_none() -> None:
    hosts = PLACES["2x2"]
    data = [values(rank, 4 * 100, torch.float32, seed=20) for rank in range(4)]
    transports = tier_transports(hosts)

    def without_boards() -> bool:
        for transport in transports:
            transport.close()
        transports.clear()
        return mapped_boards() == 0

    assert mapped_boards() > 0 and in_child(without_boards)

    def one(rank: int) -> torch.Tensor:
        mine = data[rank].clone()
        transports[rank].all_reduce(mine)
        return mine

    assert_all_equal(on_ranks(4, one), tier_sum(data, hosts))
    for transport in transports:
        transport.close()

    def after_the_end() -> bool:
        transports[0].close()
        transports.clear()
        return True

    assert in_child(after_the_end)
