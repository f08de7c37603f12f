"""Addresses at which other ranks reach this one, and the comparison of the ranks' records."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore

from commsched.env import read_settings
from commsched.errors import CommError
from commsched.process import rendezvous
from commsched.process.launch import Launch
from commsched.process.network import first_reachable, is_loopback, own_addresses
from commsched.process.rendezvous import (
    Record,
    _arrive,
    _disagreement,
    _exchange_records,
    _reachable_address,
    launcher_server,
)


def record(rank, size=2, own="10.0.0.1", master="10.0.0.1"):
    return Record(rank, size, rank, f"host{rank}", own, master)


def test_records_that_disagree():
    assert _disagreement(record(0), record(1), {}) is None
    assert "it is 2 on rank 0 (host0) and 3 on rank 1 (host1)" in (
        _disagreement(record(0), record(1, size=3), {}) or ""
    )
    assert "both started as rank 1" in (_disagreement(record(0), record(1), {1: record(1)}) or "")


@pytest.mark.parametrize(
    ("rank", "own", "seen_by_other", "expected"),
    [
        (0, "127.0.0.1", "127.0.0.1", "127.0.0.1"),  # one host
        (0, "127.0.0.1", "10.0.0.1", "10.0.0.1"),  # rank 0 dials itself, the others dial its card
        (0, "192.168.0.9", "10.0.0.1", "10.0.0.1"),  # rank 0 has two cards: what the others dial is right
        (1, "10.0.0.2", "10.0.0.1", "10.0.0.2"),  # another host
        (1, "127.0.0.1", "10.0.0.1", "10.0.0.1"),  # rank 0's neighbour on the same host
    ],
)
def test_the_address_others_can_reach(monkeypatch, rank, own, seen_by_other, expected):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    mine = record(rank, own=own, master=own)
    first = mine if rank == 0 else record(0, own="127.0.0.1", master="127.0.0.1")
    other = record(2, own="10.0.0.3", master=seen_by_other)
    assert _reachable_address(mine, (first, mine, other)) == expected


def test_own_addresses(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_addresses(one_host=True) == ["127.0.0.1"]
    everywhere = own_addresses(one_host=False)
    assert everywhere == ["127.0.0.1"] or not any(map(is_loopback, everywhere))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_addresses(one_host=True) == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchcard0")
    with pytest.raises(RuntimeError, match="nosuchcard0"):
        own_addresses(one_host=False)


@pytest.mark.parametrize("port", ["70000", "-1", "http", "1" * 5000])
def test_a_wrong_port_is_named(monkeypatch, port):
    """It was a type error, from within torch."""
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", port)
    with pytest.raises(CommError, match="_PORT must be a whole number, at most 65,535, got"):
        launcher_server()


def test_rank_0_does_not_answer():
    said = r"rank 0 did not answer on 127.0.0.1, port 1, .*: Connection refused; is it running"
    with pytest.raises(CommError, match=said):
        first_reachable(["127.0.0.1"], 1, timeout=0.2)


def test_addresses_of_ipv6_are_refused_at_once():
    """Every rank waited for the whole time-out, and asked whether rank 0 was running."""
    with pytest.raises(
        CommError, match=r"rank 0 is at ::1, of IPv6, and ranks meet over IPv4: .*MASTER_ADDR"
    ):
        first_reachable(["::1"], 1, timeout=3600)


def test_localhost_is_dialled_over_ipv4():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert first_reachable(["no-such-host.invalid", "localhost"], port, timeout=200) == (
            "127.0.0.1",
            "127.0.0.1",
        )


def test_a_rank_that_starts_after_the_first_init_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 answered no arrival at its second try, so that the late rank waited until the time-out."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    launch = Launch("torchrun", 0, 2, 0, 1, "host0")
    here, late = (rendezvous._StoreConnection(store, "127.0.0.1", "127.0.0.1") for _ in range(2))
    monkeypatch.setattr(rendezvous, "_connection", here)
    patience = {"COMMSCHED_START_TIMEOUT": "0.2"}
    monkeypatch.setattr(rendezvous, "settings", lambda: read_settings(patience))
    with pytest.raises(CommError, match=r"missing: \[1\]"):
        rendezvous.meet(launch)
    patience["COMMSCHED_START_TIMEOUT"] = "60"
    with ThreadPoolExecutor(1) as threads:
        first, deadline = threads.submit(rendezvous.meet, launch), time.monotonic() + 60
        job, meeting = _arrive(store, record(1), deadline)
        assert (job, meeting) == (
            1,
            2,
        )  # where a rank is whose first init() has failed too, or has met without 0
        records = PrefixStore(f"commsched/{job}/{meeting}", store)
        met = _exchange_records(records, record(1), deadline, late)
        assert met == first.result().records and [each.rank for each in met] == [0, 1]
