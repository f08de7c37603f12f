"""Which transport `auto` takes: tiers where ranks share a host, if the facts agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from commsched.backends import cpu
from commsched.collectives import private_groups
from commsched.process.rendezvous import Record


def job(
    monkeypatch: pytest.MonkeyPatch, places: Sequence[tuple[str, int]], members: Sequence[int] | None = None
) -> SimpleNamespace:
    """A job whose ranks have these nodes and local ranks; returns the process set of its members."""
    size = len(places)
    records = tuple(Record(rank, size, local, node, "", "") for rank, (node, local) in enumerate(places))
    ranks = list(range(size)) if members is None else list(members)
    carrier = SimpleNamespace(
        meeting=SimpleNamespace(records=records),
        launch=SimpleNamespace(rank=ranks[0]),
        process_set_ranks=lambda _: ranks,
    )
    monkeypatch.setattr(private_groups, "carrier", lambda: carrier)
    monkeypatch.setattr(private_groups, "registered_id", lambda _: 0)
    return SimpleNamespace(rank=lambda: 0, size=lambda: len(ranks))


def on(*nodes: str) -> list[tuple[str, int]]:
    """Places of ranks on these nodes, with local ranks in the order of the ranks."""
    return [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "members", "hosts", "transport"),
    [
        ("aabb", None, [0, 0, 1, 1], "tiers"),
        ("baba", None, [0, 1, 0, 1], "tiers"),
        ("aaab", None, [0, 0, 0, 1], "tiers"),
        ("aabb", [1, 2], [0, 1], "direct"),
        ("aabb", [2, 1, 3], [0, 1, 0], "tiers"),
        ("aaaa", None, [0, 0, 0, 0], "tiers"),
        ("aaaaaaaaa", None, [0] * 9, "tiers"),
        ("aabb", [2, 3], [0, 0], "tiers"),
        ("abcd", None, [0, 1, 2, 3], "direct"),
        ("abcdefghi", None, list(range(9)), "ring"),
        ("a", None, [0], "direct"),
    ],
)
def test_hosts_decide(
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    members: list[int] | None,
    hosts: list[int],
    transport: str,
) -> None:
    ranks = job(monkeypatch, on(*nodes), members)
    assert private_groups.hosts_of(ranks) == hosts
    assert cpu.choose(ranks) == transport


@pytest.mark.parametrize(
    ("nodes", "transport"), [("aaa", "tiers"), ("aabb", "tiers"), ("abcdefghi", "direct"), ("a", "direct")]
)
def test_blocks_never_take_a_ring(monkeypatch: pytest.MonkeyPatch, nodes: str, transport: str) -> None:
    assert cpu.choose(job(monkeypatch, on(*nodes)), whole=False) == transport


def test_facts_that_contradict_each_other_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """RANK and WORLD_SIZE set by hand on two hosts: every rank takes itself for one of a single host."""
    ranks = job(monkeypatch, [("a", 0), ("a", 1), ("b", 2), ("b", 3)])
    with pytest.raises(
        ValueError, match=r"the 2 ranks on host 'b' must have the local ranks 0 to 1, but .*\[2, 3\]"
    ):
        private_groups.hosts_of(ranks)
    with caplog.at_level(logging.WARNING, logger="commsched"):
        assert cpu.choose(ranks) == "direct"
    assert "transport='direct', not 'tiers'" in caplog.text and "host 'b'" in caplog.text


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no transport 'rings'; the transports are auto, direct, ring, tiers, horovod"
    ):
        cpu.asked_transport("rings")
