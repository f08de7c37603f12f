"""Arguments that are wrong whatever the other ranks do: ``ValueError`` before anything is sent."""

import socket

import pytest
import torch

from commsched.collectives.process_sets import ProcessSet, registered_id
from commsched.collectives.torch_carrier.argument_checks import check_splits, check_tensors, even_splits
from commsched.process.network import first_reachable, is_loopback, own_addresses
from commsched.process.rendezvous import Record, _disagreement, _reachable_address


def test_tensors_that_can_travel():
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.uint8):
        check_tensors("allreduce", [torch.ones(2, dtype=dtype)], reduces=True)
    check_tensors("broadcast", [torch.ones(2, dtype=torch.bool)])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([], "at least one tensor"),
        ([torch.ones(2, dtype=torch.bool)], "torch.bool"),
        ([torch.ones(2, dtype=torch.complex64)], "torch.complex64"),
        ([torch.ones(2, 3).t()], "contiguous"),
        ([torch.ones(2).to_sparse()], "dense"),
        ([torch.ones(2), torch.ones(2, device="meta")], "one device"),
    ],
)
def test_tensors_that_can_not(tensors, text):
    with pytest.raises(ValueError, match=text):
        check_tensors("allreduce", tensors, reduces=True)


def test_splits():
    assert even_splits(torch.ones(6, 2), 3) == [2, 2, 2]
    assert check_splits(torch.ones(6, 2), torch.tensor([1, 0, 5]), 3) == [1, 0, 5]
    assert check_splits(torch.ones(6), torch.tensor([1, 0, 2]), 3) == [1, 0, 2]


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (torch.tensor([1.0, 1.0]), "32-bit"),
        (torch.tensor([1, 1, 1]), "each of 2 ranks"),
        (torch.tensor([[1, 1]]), "each of 2 ranks"),
        (torch.tensor([3, 2]), "at most"),
        (torch.tensor([-1, 2]), "at least 0"),
    ],
)
def test_splits_that_do_not_fit(splits, text):
    with pytest.raises(ValueError, match=text):
        check_splits(torch.ones(4), splits, 2)


def test_uneven_first_dimension_needs_splits():
    with pytest.raises(ValueError, match="it is 5"):
        even_splits(torch.ones(5), 2)


def test_process_set_arguments():
    assert ProcessSet(range(3)).ranks == [0, 1, 2] and ProcessSet((2, 0)).ranks == [0, 2]
    for wrong in (3, ["0"], [0.5], object()):
        with pytest.raises(ValueError, match="list of ranks"):
            ProcessSet(wrong)
    with pytest.raises(ValueError, match="not registered"):
        registered_id(ProcessSet([0]))
    assert ProcessSet([0]).size() is None and ProcessSet([0]).rank() is None


def record(rank, size=2, own="10.0.0.1", master="10.0.0.1"):
    return Record(rank, size, rank, f"host{rank}", own, master)


def test_ranks_that_disagree_when_they_sign_in():
    assert _disagreement(record(0), record(1), {}) is None
    assert "told 2, rank 1 on host1 was told 3" in (_disagreement(record(0), record(1, size=3), {}) or "")
    assert "both say they are rank 1" in (_disagreement(record(0), record(1), {1: record(1)}) or "")


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


def test_nobody_answers():
    with pytest.raises(RuntimeError, match="rank 0 did not answer on 127.0.0.1, port 1,"):
        first_reachable(["127.0.0.1"], 1, timeout=0.2)


def test_localhost_is_dialled_over_ipv4():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert first_reachable(["no-such-host.invalid", "localhost"], port, timeout=200) == (
            "127.0.0.1",
            "127.0.0.1",
        )
