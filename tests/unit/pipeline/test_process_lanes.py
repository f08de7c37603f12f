"""Lanes of stages and channels of tiles over the connections between processes."""

from __future__ import annotations

import threading

import pytest
import torch

from comm_core import MessageChannel, Traffic, link_gate, local_message_channels
from commsched.channels import ProcessChannel
from commsched.errors import CommError
from commsched.pipeline.messages import ProcessLane, receive_tree, send_tree

MUCH = 4 << 20  # elements: more than the sockets' buffers take


def lanes(traffic: Traffic | None = None) -> list[ProcessLane]:
    return [ProcessLane(channel, 3, "pipeline 0: stages", traffic) for channel in local_message_channels(2)]


def test_trees_travel_with_their_description() -> None:
    first, second = lanes()
    tree = {"x": torch.randn(3, 5), "none": None, "deep": [torch.arange(4), 2.5, torch.empty(0, 7)]}
    pendings = send_tree(first, 1, tree)
    received = receive_tree(second, 0)
    for pending in pendings:
        pending.wait()
    assert received["none"] is None and received["deep"][1] == 2.5
    for one, other in ((received["x"], tree["x"]), (received["deep"][0], tree["deep"][0])):
        assert torch.equal(one, other)
    assert received["deep"][2].shape == (0, 7)


def test_only_long_messages_take_a_turn_on_the_link_and_end_it_when_they_have_left() -> None:
    gate = link_gate()
    gate.record(True)
    try:
        first, second = lanes(traffic=Traffic.activation)
        for size in (1, MUCH):
            receiving = second.receive(0, [torch.empty(size)])
            first.send(1, [torch.ones(size)]).wait()
            receiving.wait()
        passages = gate.passages()
    finally:
        gate.record(False)
    assert [passage["bytes"] for passage in passages] == [4 * MUCH]
    assert passages[0]["end"] > passages[0]["start"]


def test_meshes_on_the_same_connections_do_not_mix() -> None:
    ends = local_message_channels(3)
    meshes = [((0, 1, 2), "mesh 0"), ((2, 1, 0), "mesh 0"), ((0, 2), "mesh 0"), ((0, 1, 2), "mesh 1")]
    results: dict[int, list[float]] = {}

    def one(rank: int) -> None:
        got = []
        for number, (places, name) in enumerate(meshes):
            if rank not in places:
                continue
            channel = ProcessChannel(ends[rank], rank, places, name)
            assert places[channel.rank] == rank and channel.size == len(places)
            buffers = [torch.zeros(2) for _ in places]
            sends = [(peer, torch.full((2,), 10.0 * number + channel.rank)) for peer in others(channel)]
            recvs = [(peer, buffers[peer]) for peer in others(channel)]
            channel.exchange(sends, recvs, "halo").wait()
            assert channel.sent == 8 * (channel.size - 1)
            got += [float(buffers[peer][0]) - 10 * number - peer for peer in others(channel)]
        results[rank] = got

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {0, 1, 2} and not any(value for got in results.values() for value in got)


def others(channel: ProcessChannel) -> list[int]:
    return [peer for peer in range(channel.size) if peer != channel.rank]


def test_errors_name_the_operation_and_the_rank() -> None:
    first, second = lanes()
    first.send(1, [torch.ones(2)])
    with pytest.raises(CommError, match="pipeline 0: stages: rank 1 expected 4 bytes of rank 0 and got 8"):
        second.receive(0, [torch.ones(1)]).wait()
    with pytest.raises(CommError, match="rank 0 of 2 has no connection to rank 5"):
        first.send(5, [torch.ones(1)])
    left, right = local_message_channels(2)
    tiles = ProcessChannel(left, 0, [0, 1], "mesh")
    with pytest.raises(CommError, match=r"^conv: fetch: rank 0 has a tile on meta, where there is no data"):
        tiles.exchange([(1, torch.ones(1))], [(1, torch.ones(1, device="meta"))], "conv: fetch")
    halo = tiles.exchange([], [(1, torch.ones(1))], "conv: fetch")
    right.abort("its disk is full")
    with pytest.raises(CommError, match=r"fetch: rank 0 has lost rank 1 \(it gave up: its disk is full\)"):
        halo.wait()
    assert left.timeout == MessageChannel(0, []).timeout == 300
