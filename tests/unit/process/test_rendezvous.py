"""Addresses at which other ranks reach this one, and the comparison of the ranks' records."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

from comm_core import Waiting
from commsched.env import read_settings
from commsched.errors import CommError
from commsched.process import rendezvous
from commsched.process.launch import Launch
from commsched.process.network import HeldPort, first_reachable, is_loopback, own_addresses
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
    # A connection each, as ranks have: a get() that waits for the other's set() keeps its connection busy.
    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", served.port, None, False, wait_for_workers=False)
    launch = Launch("torchrun", 0, 2, 0, 1, "host0")
    here, late = (rendezvous._StoreConnection(each, "127.0.0.1", "127.0.0.1") for each in (served, store))
    monkeypatch.setattr(rendezvous, "_connection", here)
    monkeypatch.setattr(rendezvous, "settings", lambda: read_settings({"COMMSCHED_START_TIMEOUT": "60"}))
    with pytest.raises(CommError, match=r"missing: \[1\]"):
        rendezvous.meet(launch, patience=0.2)
    with ThreadPoolExecutor(1) as threads:
        first, waiting = threads.submit(rendezvous.meet, launch), Waiting(1, 60)
        job, meeting = _arrive(store, record(1), waiting)
        assert (job, meeting) == (1, 2)  # where a rank is whose first init() has failed too
        records = PrefixStore(f"commsched/{job}/{meeting}", store)
        met = _exchange_records(records, record(1), waiting, late)
        assert met == first.result().records and [each.rank for each in met] == [0, 1]


# -- a store that ends, is silent, or cannot be found --------------------------------------------------------

RANK_1 = Launch("torchrun", 1, 2, 1, 2, "host0")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The settings of the test; no store is connected, and the variables of a launcher are not set."""
    variables = {"COMMSCHED_START_TIMEOUT": "0.2", "COMMSCHED_TIMEOUT": "2"}
    monkeypatch.setattr(rendezvous, "settings", lambda: read_settings(variables))
    monkeypatch.setattr(rendezvous, "_connection", None)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield variables
    for thread in threading.enumerate():  # one that comes back from C++ while Python ends aborts the process
        if thread.name == "commsched-store":
            thread.join(60)


def test_init_finds_a_rank_0_that_was_started_again(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to the ended rank 0 was kept, so that each further init() of the process failed."""
    patience["COMMSCHED_START_TIMEOUT"] = "60"
    stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(2)]
    ended = TCPStore("127.0.0.1", stores[0].port, None, False, wait_for_workers=False)
    del stores[0]
    monkeypatch.setattr(
        rendezvous, "_connection", rendezvous._StoreConnection(ended, "127.0.0.1", "127.0.0.1")
    )
    with pytest.raises(CommError, match="rank 0 ended while rank 1 was waiting"):
        rendezvous.meet(RANK_1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(stores[0].port))
    with ThreadPoolExecutor(1) as threads:
        second, waiting = threads.submit(rendezvous.meet, RANK_1), Waiting(0, 60)
        first = rendezvous._StoreConnection(stores[0], "127.0.0.1", "127.0.0.1")
        first.job, first.meetings = _arrive(stores[0], record(0), waiting)
        records = PrefixStore(f"commsched/{first.job}/{first.meetings}", stores[0])
        assert _exchange_records(records, record(0), waiting, first) == second.result().records


def test_mpi_broadcasts_rank_0s_address_only_once(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone rank that took part in another broadcast would wait in it for all others."""

    class Ended(HashStore):
        def add(self, key: str, number: int) -> int:
            raise DistNetworkError("recv: got 0 bytes")

    patience["COMMSCHED_START_TIMEOUT"] = "60"
    kept = rendezvous._StoreConnection(Ended(), "127.0.0.1", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "_connection", kept)
    with pytest.raises(CommError, match="rank 0 ended while rank 1"):
        rendezvous.meet(Launch("mpirun", 1, 2, 1, 2, "host0", mpi=True))
    assert rendezvous._connection is kept


def test_a_store_that_does_not_answer_ends_the_meeting(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch waits for ever for a store whose process is stopped, or whose host is cut off."""

    class Silent(HashStore):
        def add(self, key: str, number: int) -> int:
            released.wait(5)
            return super().add(key, number)

    released = threading.Event()
    silent = rendezvous._StoreConnection(Silent(), "127.0.0.1", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "_connection", silent)
    said = r"rank 1 cannot meet .*: the ranks' store, .* did not answer within 0\.[12]\d* s.* stopped, or its"
    with pytest.raises(CommError, match=said):
        rendezvous.meet(RANK_1)
    released.set()
    assert rendezvous._connection is None


def test_a_store_that_is_stopped_before_the_first_question(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts the connection, and torch waited for ever for the first answer."""
    patience["COMMSCHED_TIMEOUT"] = "0.3"  # torch's time for further tries once the socket is closed
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        monkeypatch.setenv("MASTER_PORT", str(stopped.getsockname()[1]))
        end = threading.Timer(3, lambda: stopped.shutdown(socket.SHUT_RDWR))  # of torch's wait
        end.start()
        with pytest.raises(CommError, match=r"is stopped, or is not the store of rank 0: .* did not answer"):
            rendezvous.meet(RANK_1)
        end.cancel()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_named(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Rank 0 waited COMMSCHED_TIMEOUT for torch to resolve it, and then asked whose the port was."""
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with HeldPort() as port:
        monkeypatch.setenv("MASTER_PORT", str(port.number))
        said = r"within 0\.2 s .*cannot resolve the name 'no-such-host\.invalid' .*check rank 0's address"
        with pytest.raises(CommError, match=said):
            rendezvous.meet(Launch("torchrun", rank, 2, rank, 2, "host0"))


@pytest.mark.parametrize("published", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
def test_rank_0_listens_only_where_it_is_dialled(
    patience: dict[str, str], monkeypatch: pytest.MonkeyPatch, published: list[str]
) -> None:
    """It listened on every network of its host."""
    patience["COMMSCHED_START_TIMEOUT"] = "60"
    monkeypatch.setattr(rendezvous, "own_addresses", lambda one_host: published)
    contacts = []

    def publish(contact):
        contacts.append(contact)
        return contact

    here = rendezvous._connect(Launch("mpirun", 0, 2, 0, 2, "host0", mpi=True), publish, 60)
    other = rendezvous._join(published[-1:], contacts[0]["port"], contacts[0]["token"], 60)
    here.store.set("found", "yes")
    assert other.store.get("found") == b"yes"
    for address in ("127.0.0.1", "127.0.0.2"):
        with closing(socket.socket()) as probe:
            reached = probe.connect_ex((address, contacts[0]["port"])) == 0
        assert reached == (address in published), address
