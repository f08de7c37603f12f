"""Links: costs, parsing, networks by hand, fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ir.actions import Kind
from scheduler.ir.link import (
    ALGORITHMS,
    SEGMENT,
    STARTUP,
    Level,
    Link,
    Occupancy,
    TwoTierLink,
    fit,
    network_link,
)


def test_all_reduce_is_one_of_each() -> None:
    link = Link(2.0, 0.5)
    assert link.cost(Kind.RS, 10) == link.cost(Kind.AG, 10) == 7.0
    assert link.cost(Kind.AR, 10) == 14.0


@pytest.mark.parametrize(
    ("text", "alpha", "beta"),
    [
        ("alpha=2e-4,beta=8e-10", 2e-4, 8e-10),
        (" beta=1e-9 , alpha=0 ", 0.0, 1e-9),
        ("1gbit", STARTUP, 8e-9),
        ("10GbE", STARTUP, 8e-10),
        ("250mbit,alpha=1e-3", 1e-3, 3.2e-8),
        ("alpha=1e-3,250mbit", 1e-3, 3.2e-8),
    ],
)
def test_parse(text: str, alpha: float, beta: float) -> None:
    link = Link.parse(text)
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta))
    assert Link.parse(str(link)).to_dict() == {**link.to_dict(), "name": str(link)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs both alpha"),
        ("alpha=1", "needs both alpha"),
        ("alpha=x,beta=1", "alpha must be a number, got 'x'"),
        ("alpha=nan,beta=1", "alpha must be a finite number of at least 0, got nan"),
        ("alpha=1,beta=-1", "beta must be a finite number of at least 0, got -1.0"),
        ("10gbits", "cannot read '10gbits'"),
        ("0gbit", "moves nothing"),
        ("10gbit,1gbit", "1gbit gives beta a second time"),
        ("10gbit,beta=1e-9", "beta=1e-9 gives beta a second time"),
        ("alpha=1,beta=1,alpha=2", "alpha=2 gives alpha a second time"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link.parse(text)


def test_ring_and_direct_by_hand() -> None:
    """4 ranks: a ring makes 3 rounds of a quarter each; direct sends all 3 quarters after one start-up."""
    levels = [Level(4, 1.0, 8.0)]
    assert network_link(levels).cost(Kind.RS, 10) == 3 * 1.0 + 8.0 * 7.5
    assert network_link(levels, "direct").cost(Kind.RS, 10) == 1.0 + 8.0 * 7.5
    assert network_link([Level(4, 1.0, 8.0, overhead=0.5)], "direct").alpha == 1.0 + 2 * 0.5


def test_two_levels_by_hand() -> None:
    """2 hosts of 4 ranks, 16 bytes; inside 1 s/byte, the hosts' cards 10 s/byte."""
    levels = (Level(4, 0.1, 1.0), Level(2, 3.0, 10.0))
    # Inside: 3/4 of 16 bytes over each rank's wire; then each of 4 ranks swaps half of its 4 bytes over the
    # card: 8 bytes.
    assert network_link(levels, "hierarchical").cost(Kind.RS, 16) == pytest.approx(3 * 0.1 + 12 + 3.0 + 80)
    # One ring of 8: 7 rounds, and 7/8 of 16 bytes cross each card.
    assert network_link(levels, "ring").cost(Kind.RS, 16) == pytest.approx(7 * 3.0 + 140)
    # Direct: 4 ranks of a host send 2 bytes to each of the 4 others.
    assert network_link(levels, "direct").cost(Kind.RS, 16) == pytest.approx(3.0 + 320)


def test_two_tiers_by_hand() -> None:
    """2 hosts of 4 ranks: 3/4 of the bytes on each rank's wire inside, half of them on each host's card."""
    levels = (Level(4, 0.1, 1.0), Level(2, 3.0, 10.0))
    serial, overlapped = (network_link(levels, name) for name in ("tiers", "tiers-overlapped"))
    assert isinstance(serial, TwoTierLink) and isinstance(overlapped, TwoTierLink)
    assert (serial.inside, serial.between) == (Link(0.1, 0.75), Link(3.0, 5.0))
    # One bucket after the other: its first segments are inside the host alone, then the slower link counts.
    segment, size = 8 * SEGMENT, 10 * 8 * SEGMENT
    assert serial.times(Kind.RS, size) == Occupancy(0.0, 3.1 + 0.75 * segment + 5 * size, 0.0)
    assert serial.cost(Kind.AR, size) == 2 * serial.cost(Kind.AG, size) == 2 * serial.cost(Kind.RS, size)
    # Less than a segment is first inside, then between hosts.
    assert serial.times(Kind.RS, 16) == Occupancy(0.0, 3.1 + 12 + 80, 0.0)
    assert serial.slower(2).cost(Kind.RS, 16) == 2 * serial.cost(Kind.RS, 16)
    inside, between = 0.1 + 12, 3.0 + 80
    assert overlapped.times(Kind.RS, 16) == pytest.approx((inside, between, 0.0))
    assert overlapped.times(Kind.AG, 16) == pytest.approx((0.0, between, inside))
    assert overlapped.times(Kind.AR, 16) == pytest.approx((inside, 2 * between, inside))
    assert network_link([Level(1, 9.0, 9.0), Level(2, 3.0, 10.0)], "tiers") == Link(3.0, 5.0, "tiers of 2")
    with pytest.raises(ValueError, match="two levels, ranks of a host and hosts; got 3 levels"):
        network_link([*levels, Level(2, 1.0, 1.0)], "tiers")


def test_a_wider_link_between_hosts_leaves_the_host_as_it_is() -> None:
    link = TwoTierLink(1.0, 6.0, inside=Link(0.5, 1.0), between=Link(0.5, 5.0))
    assert link.widened(2) == TwoTierLink(1.0, 3.5, inside=Link(0.5, 1.0), between=Link(0.5, 2.5))
    assert link.slower(2) == TwoTierLink(2.0, 12.0, inside=Link(1.0, 2.0), between=Link(1.0, 10.0))
    assert Link(1.0, 6.0).widened(2) == Link(1.0, 3.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_needs_no_link(algorithm: str) -> None:
    assert network_link([Level(1, 1.0, 1.0)], algorithm).cost(Kind.AR, 100) == 0.0


def test_a_ring_through_the_ranks_of_two_tiers() -> None:
    """2 hosts of 4 ranks: 7 rounds, and 7/8 of the bytes cross each card; two tiers send 1/2 of them."""
    levels = (Level(4, 0.1, 1.0), Level(2, 3.0, 10.0))
    tiers = network_link(levels, "tiers")
    assert tiers.as_ring() == Link(7 * 3.0, 8.75)
    assert tiers.widened(2).as_ring() == Link(7 * 3.0, 4.375)
    assert network_link([Level(4, 3.0, 1.0), Level(2, 0.1, 0.5)], "tiers").as_ring() == Link(7 * 3.0, 0.875)
    uncounted = replace(tiers, members=())
    assert uncounted.as_ring() is uncounted
    with pytest.raises(ValueError, match=r"ranks a host and hosts, 2 or more, got \(4, 1\)"):
        replace(tiers, members=(4, 1))


def test_halving_by_hand() -> None:
    """4 ranks in 2 rounds, 6 in 3; 2 hosts of 4 ranks as a hierarchy of rings, with fewer messages inside."""
    assert network_link([Level(4, 1.0, 8.0)], "halving").cost(Kind.RS, 10) == 2 * 1.0 + 8.0 * 7.5
    assert network_link([Level(6, 1.0, 6.0, overhead=0.5)], "halving").cost(Kind.RS, 10) == 3 * 1.5 + 50
    levels = (Level(4, 0.1, 1.0), Level(2, 3.0, 10.0))
    assert network_link(levels, "halving").cost(Kind.RS, 16) == pytest.approx(2 * 0.1 + 12 + 3.0 + 80)


@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_halving_takes_what_an_exchange_takes(rounds: int) -> None:
    """The reduce-scatter played with numbers: each rank sends half of what it still sums to a peer."""
    ranks = 1 << rounds
    parts, sent, messages = [np.random.default_rng(rank).integers(0, 9, ranks) for rank in range(ranks)], 0, 0
    total, low, high = sum(parts), [0] * ranks, [ranks] * ranks
    while high[0] - low[0] > 1:
        half, before = (high[0] - low[0]) // 2, [part.copy() for part in parts]
        messages, sent = messages + 1, sent + half
        for rank in range(ranks):
            upper = rank & half
            low[rank], high[rank] = (low[rank] + half, high[rank]) if upper else (low[rank], low[rank] + half)
            keeps = slice(low[rank], high[rank])
            parts[rank][keeps] = before[rank][keeps] + before[rank ^ half][keeps]
    assert all(low[rank] == rank and parts[rank][rank] == total[rank] for rank in range(ranks))
    link = network_link([Level(ranks, 1.0, 1.0)], "halving")
    assert (messages, sent) == (link.alpha, link.beta * ranks)


@given(st.integers(2, 64), st.integers(2, 64))
def test_hierarchy_of_equal_wires_moves_no_more_start_ups(inner: int, outer: int) -> None:
    levels = (Level(inner, 1.0, 1.0), Level(outer, 1.0, 1.0))
    ring, tree = network_link(levels, "ring"), network_link(levels, "hierarchical")
    assert tree.alpha <= ring.alpha
    assert tree.beta >= ring.beta


def test_network_errors() -> None:
    with pytest.raises(
        ValueError, match="no algorithm 'tree'; the algorithms are ring, direct, hierarchical"
    ):
        network_link([Level(2, 0.0, 1.0)], "tree")
    with pytest.raises(ValueError, match="at least one level"):
        network_link([])
    with pytest.raises(ValueError, match="at least 1 member, got 0"):
        Level(0, 0.0, 1.0)


SIZES = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-6))
def test_fit_finds_an_exact_link(alpha: float, beta: float) -> None:
    link = fit(SIZES, [alpha + beta * size for size in SIZES], "net")
    assert link.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-9 + 1e-6 * beta * SIZES[0])
    assert link.beta == pytest.approx(beta, rel=1e-6)
    assert link.error < 1e-6
    assert link.name == "net"


def test_fit_of_noisy_times_states_its_error() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.05, (20, len(SIZES)))
    times = noise * (2e-4 + 8e-10 * np.array(SIZES))
    link = fit(SIZES * 20, list(times.ravel()))
    assert link.alpha == pytest.approx(2e-4, rel=0.03)
    assert link.beta == pytest.approx(8e-10, rel=0.03)
    assert link.error == pytest.approx(0.05, rel=0.2)


def test_fit_stays_at_or_above_zero() -> None:
    assert fit(SIZES, [1e-9 * size**1.1 for size in SIZES]).alpha == 0.0
    assert fit(SIZES, [1.0 / (k + 1) for k in range(len(SIZES))]).beta == 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1, 2, 3, 4], [1.0] * 4, "at least 5 sizes, got 4"),
        ([1] * 10, [1.0] * 10, "at least 5 sizes, got 1"),
        ([1, 2, 3, 4, 5], [1.0] * 4, "as many times as sizes"),
        (
            [1, 2, 3, 4, 5],
            [1, 1, 1, 1, float("nan")],
            "seconds must be finite numbers of at least 0, got nan",
        ),
        ([1, 2, 3, 4, -5], [1.0] * 5, "sizes must be finite numbers of at least 0, got -5"),
        ([1, 2, 3, 4, 5], [1, 1, 1, 1, 0], "0 seconds was not measured"),
    ],
)
def test_fit_errors(sizes: list[float], seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(sizes, seconds)


def test_files_round_trip(tmp_path: Path) -> None:
    link = Link(2e-4, 8e-10, "measured", 0.03)
    link.save(tmp_path / "link.json")
    assert Link.load(tmp_path / "link.json") == link
    assert set(json.loads((tmp_path / "link.json").read_text())) == {
        "format",
        "alpha",
        "beta",
        "name",
        "error",
    }
    tiers = TwoTierLink(2e-4, 8e-10, "measured", 0.03, Link(1e-5, 1e-10), Link(2e-4, 8e-10, error=0.01))
    tiers.save(tmp_path / "tiers.json")
    assert Link.load(tmp_path / "tiers.json") == TwoTierLink.load(tmp_path / "tiers.json") == tiers
    modelled = network_link([Level(4, 0.1, 1.0), Level(2, 3.0, 10.0)], "tiers")
    modelled.save(tmp_path / "modelled.json")
    assert Link.load(tmp_path / "modelled.json") == modelled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": -1}, "alpha must be a finite number of at least 0, got -1"),
        ({"beta": "x"}, "beta: must be a number, got 'x'"),
        ({"format": 2}, "field 'format' is 2"),
        ({"gamma": 0}, r"unknown fields \['gamma'\]"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps({**Link(1.0, 1.0).to_dict(), **change}))
    with pytest.raises(ValueError, match=message) as error:
        Link.load(path)
    assert str(path) in str(error.value)
