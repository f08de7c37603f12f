"""The order of in-stream communication: whatever streams may do, the numbers are right, and the host
never waits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from commsched.backends.cuda import StreamBucket, StreamSchedule
from commsched.errors import CommError
from tests.support.stream_device import FakeDevice, FakeExchange, Network, run

PLANS = {
    "RS first": [("RS", 0), ("RS", 1), ("RS", 2), ("AG", 2), ("AG", 1), ("AG", 0)],
    "AG in gaps": [("RS", 0), ("RS", 1), ("AG", 0), ("RS", 2), ("AG", 2), ("AG", 1)],
    "AR": [("AR", 0), ("AR", 1), ("AR", 2)],
    "another order": [("RS", 1), ("AG", 1), ("RS", 0), ("RS", 2), ("AG", 0), ("AG", 2)],
}
LENGTH = 8


class Rank:
    """One rank's three buckets; gradients of step s in bucket b are 100 s + 10 b + rank, everywhere."""

    def __init__(self, network: Network, rank: int, sharded: bool = False) -> None:
        self.rank, self.sharded, self.size = rank, sharded, network.size
        self.device = FakeDevice()
        self.schedule = StreamSchedule(
            self.device, FakeExchange(network, rank, self.device), rank, network.size
        )
        self.buckets = [
            StreamBucket(torch.zeros(LENGTH), gather=torch.zeros(LENGTH) if sharded else None)
            for _ in range(3)
        ]
        self.seen: list[list[float]] = []

    def gradient(self, step: int, bucket: int) -> float:
        return 100.0 * step + 10.0 * bucket + self.rank

    def backward(self, step: int, order: tuple[int, ...]) -> None:
        for bucket in order:
            data, value = self.buckets[bucket].data, self.gradient(step, bucket)
            self.device.compute(lambda data=data, value=value: data.fill_(value))
            self.schedule.mark(bucket, "ready")

    def update(self, bucket: int) -> None:
        """Sharded: parameters become the reduced gradients."""
        self.schedule.wait(bucket, "reduced")
        part = LENGTH // self.size
        mine = slice(self.rank * part, (self.rank + 1) * part)
        b = self.buckets[bucket]
        assert b.gather is not None
        target = b.gather
        self.device.compute(lambda: target[mine].copy_(b.data[mine]))
        self.schedule.mark(bucket, "updated")

    def forward(self, order: tuple[int, ...]) -> None:
        for bucket in order:
            self.schedule.wait(bucket, "gathered")
            b = self.buckets[bucket]
            result = b.data if b.gather is None else b.gather
            self.device.compute(lambda result=result: self.seen.append(result.tolist()))


def expected(step: int, bucket: int, size: int) -> list[float]:
    return [sum(100.0 * step + 10.0 * bucket + rank for rank in range(size))] * LENGTH


def ranks_of(size: int, plan: list[tuple[str, int]], sharded: bool = False) -> tuple[Network, list[Rank]]:
    network = Network(size)
    ranks = [Rank(network, r, sharded) for r in range(size)]
    for rank in ranks:
        rank.schedule.install(plan, rank.buckets)
    return network, ranks


# An all-reduce leaves no place for an update of shards.
WAYS = [(name, False) for name in PLANS] + [(name, True) for name in PLANS if name != "AR"]


@pytest.mark.parametrize(("name", "sharded"), WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_three_steps_in_any_order_that_streams_allow(name: str, size: int, sharded: bool) -> None:
    """The host puts all three steps onto the streams before the device does anything at all."""
    backward, forward = (0, 1, 2), (2, 0, 1)
    for seed in range(30):
        network, ranks = ranks_of(size, PLANS[name], sharded)
        for rank in ranks:
            for step in range(1, 4):
                rank.schedule.begin_step()
                rank.backward(step, backward)
                for bucket in (b for op, b in PLANS[name] if op == "RS" and sharded):
                    rank.update(bucket)
                rank.forward(forward)
        run([rank.device for rank in ranks], seed)
        wanted = [expected(step, b, size) for step in range(1, 4) for b in forward]
        assert all(rank.seen == wanted for rank in ranks)
        per_step = [op for kind, _ in PLANS[name] for op in (("RS", "AG") if kind == "AR" else (kind,))]
        assert network.order == per_step * 3


def breaks(change: Callable[[Rank], None]) -> int:
    """How many of 30 orders go wrong when a rank leaves something out."""
    wrong = 0
    for seed in range(30):
        _, ranks = ranks_of(2, PLANS["RS first"])
        change(ranks[0])
        for rank in ranks:
            for step in (1, 2):
                rank.schedule.begin_step()
                rank.backward(step, (0, 1, 2))
                rank.forward((2, 0, 1))
        run([rank.device for rank in ranks], seed)
        wanted = [expected(step, b, 2) for step in (1, 2) for b in (2, 0, 1)]
        wrong += any(rank.seen != wanted for rank in ranks)
    return wrong


def test_the_checks_notice_a_missing_event() -> None:
    def no_wait_before_the_forward(rank: Rank) -> None:
        rank.schedule.wait = lambda bucket, what: None  # type: ignore[method-assign]

    def no_wait_before_travelling(rank: Rank) -> None:
        wait = rank.device.wait
        rank.device.wait = (  # type: ignore[method-assign]
            lambda stream, event: None if stream is rank.device.comm else wait(stream, event)
        )

    assert breaks(lambda rank: None) == 0
    assert breaks(no_wait_before_the_forward) > 0
    assert breaks(no_wait_before_travelling) > 0


class ClippingRank(Rank):
    """Parameters become the reduced gradients over their largest one, which no rank's host knows."""

    def clip(self) -> None:
        for bucket in range(3):
            self.schedule.wait(bucket, "reduced")
        largest = torch.full((self.size,), float("nan"))
        self.factor = torch.zeros(1)
        part = LENGTH // self.size
        mine = slice(self.rank * part, (self.rank + 1) * part)
        shards = [b.data[mine] for b in self.buckets]
        self.device.compute(lambda: largest[self.rank].copy_(torch.stack(shards).max()))
        self.schedule.gather_now(largest)
        factor = self.factor
        self.device.compute(lambda: factor.copy_(1.0 / largest.max()))

    def update(self, bucket: int) -> None:
        factor, data = self.factor, self.buckets[bucket].data
        self.device.compute(lambda: data.mul_(factor))
        super().update(bucket)


def train_clipped(size: int, seed: int, change: Callable[[Rank], None] = lambda rank: None) -> bool:
    """Whether three steps, all put onto the streams at once, gave every rank the right parameters."""
    network = Network(size)
    ranks = [ClippingRank(network, r, sharded=True) for r in range(size)]
    for rank in ranks:
        rank.schedule.install(PLANS["RS first"], rank.buckets)
    change(ranks[0])
    for rank in ranks:
        for step in range(1, 4):
            rank.schedule.begin_step()
            rank.backward(step, (0, 1, 2))
            rank.clip()
            for bucket in range(3):
                rank.update(bucket)
            rank.forward((2, 0, 1))
    run([rank.device for rank in ranks], seed)
    wanted = []
    for step in range(1, 4):
        factor = 1.0 / torch.tensor(expected(step, 2, size)[0])
        wanted += [(torch.tensor(expected(step, b, size)) * factor).tolist() for b in (2, 0, 1)]
    assert network.order == (["RS"] * 3 + ["AG"] * 4) * 3
    return all(rank.seen == wanted for rank in ranks)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_clipping_in_any_order_that_streams_allow(size: int) -> None:
    assert all(train_clipped(size, seed) for seed in range(30))


@pytest.mark.parametrize("left_out", ["comm", "main"])
def test_clipping_without_one_of_its_waits_is_noticed(left_out: str) -> None:
    def no_wait(rank: Rank) -> None:
        gather, wait, device = rank.schedule.gather_now, rank.device.wait, rank.device
        stream_left_out = getattr(device, left_out)

        def gather_now(buffer: torch.Tensor) -> None:
            device.wait = (  # type: ignore[method-assign]
                lambda stream, event: None if stream is stream_left_out else wait(stream, event)
            )
            gather(buffer)
            device.wait = wait  # type: ignore[method-assign]

        rank.schedule.gather_now = gather_now  # type: ignore[method-assign]

    assert not all(train_clipped(2, seed, no_wait) for seed in range(30))


def test_an_operation_waits_for_those_before_it_in_the_plan() -> None:
    network, (rank,) = ranks_of(1, PLANS["another order"])
    rank.schedule.begin_step()
    rank.backward(1, (0,))
    run([rank.device], 0)
    assert network.order == []
    rank.backward(1, (1,))
    run([rank.device], 0)
    assert network.order == ["RS", "AG", "RS"]
    rank.backward(1, (2,))
    run([rank.device], 0)
    assert network.order == ["RS", "AG", "RS", "RS", "AG", "AG"]


def test_is_gathered_asks_the_device() -> None:
    _, (rank,) = ranks_of(1, PLANS["AR"])
    assert not rank.schedule.is_gathered(0)
    rank.schedule.begin_step()
    rank.backward(1, (0, 1, 2))
    assert not rank.schedule.is_gathered(0)
    run([rank.device], 0)
    assert rank.schedule.is_gathered(0)


def test_waiting_for_what_was_never_started_is_an_error() -> None:
    _, (rank,) = ranks_of(1, PLANS["RS first"])
    rank.schedule.wait(0, "gathered")  # before the first step everything is in place
    rank.schedule.begin_step()
    rank.backward(1, (0,))
    with pytest.raises(CommError, match=r"bucket 0 is waited for and is not gathered in step 1: 1 of 6"):
        rank.schedule.wait(0, "gathered")
    with pytest.raises(CommError, match="step 1 ended before RS of bucket 1 was started"):
        rank.schedule.begin_step()


def test_graph_capture_is_refused_with_the_reason() -> None:
    _, (rank,) = ranks_of(1, PLANS["RS first"])
    rank.device.capturing = True
    with pytest.raises(CommError, match="cannot be captured into a CUDA graph"):
        rank.schedule.begin_step()
