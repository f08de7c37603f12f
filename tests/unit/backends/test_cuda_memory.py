"""Registered memory: one pool for each plan, registered before its buckets travel and until they have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from commsched.backends import cuda
from commsched.backends.cuda import RegisteredMemory, can_register
from commsched.errors import CommError
from tests.support.stream_device import FakeDevice, FakeExchange, Network, RegisteringGroup, run


class Numbered(RegisteredMemory):
    """Pools are numbers."""

    made = 0

    def _new_pool(self) -> int:
        self.made += 1
        return self.made

    def _within(self, pool: int) -> AbstractContextManager[Any]:
        return nullcontext(pool)


class Scene:
    """One rank whose device gets on only while its host waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float = 5.0) -> None:
        self.device = FakeDevice()
        self.network = Network(1)
        self.exchange = FakeExchange(self.network, 0, self.device)
        self.group = RegisteringGroup(check=self.nothing_travels)
        self.memory = Numbered(self.group, self.exchange, self.device, timeout)
        self.while_waiting(monkeypatch, lambda: run([self.device], seed=0))

    def while_waiting(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        monkeypatch.setattr(cuda.time, "sleep", lambda seconds: act())

    def nothing_travels(self) -> None:
        assert not self.device.comm.queue, "memory that NCCL is using was given back"

    def travel(self) -> None:
        with self.device.on(self.device.comm):
            self.exchange.reduce_scatter(torch.zeros(4), 1.0)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_group_is_connected_before_anything_is_registered(scene: Scene) -> None:
    run([scene.device], seed=0)
    assert scene.network.order == ["AG"]
    assert scene.group.registered == []


def test_one_room_for_each_plan(scene: Scene) -> None:
    for plan in (1, 2, 3):
        for _ in range(2):
            with scene.memory.room() as pool:
                assert pool == plan
        scene.memory.take_over()
        assert scene.group.registered == [plan]


def next_plan(scene: Scene) -> None:
    with scene.memory.room():
        pass
    scene.memory.take_over()


def test_a_plan_gives_its_memory_back_when_nothing_travels_any_more(scene: Scene) -> None:
    next_plan(scene)
    scene.travel()
    next_plan(scene)
    assert scene.network.order == ["AG", "RS"]
    assert scene.group.registered == [2]
    scene.travel()
    scene.memory.close()
    assert scene.network.order == ["AG", "RS", "RS"]
    assert scene.group.registered == []


def test_a_plan_gives_its_memory_back_when_nothing_reads_it_any_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the exchanges were waited for, and the updates that read what they brought could still run."""
    device, read = scene.device, []

    def communication_is_fast() -> None:
        for stream in (device.comm, device.main):
            if stream.queue and stream.queue[0][0]():
                stream.queue.popleft()[1]()
                return

    next_plan(scene)
    scene.while_waiting(monkeypatch, communication_is_fast)
    device.compute(lambda: read.append("an update"))
    scene.group._check = lambda: read.append("given back")
    next_plan(scene)
    assert read == ["an update", "given back"]


def test_the_check_notices_memory_that_is_given_back_too_early(scene: Scene) -> None:
    next_plan(scene)
    scene.travel()
    scene.device.has_passed = lambda event: True  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="that NCCL is using"):
        next_plan(scene)


def test_a_device_that_hangs_is_told_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, timeout=0.05)
    scene.while_waiting(monkeypatch, lambda: None)
    next_plan(scene)
    scene.travel()
    with pytest.raises(CommError, match=r"rank 0: the GPU did not end its communication in 0.05 s.*TIMEOUT"):
        next_plan(scene)
    scene.memory.close()  # no error, so that the first one is seen
    assert scene.group.registered == [1]


def test_an_aborted_group_is_left_alone(scene: Scene) -> None:
    next_plan(scene)
    scene.travel()
    scene.memory.forget()
    scene.memory.close()
    assert scene.device.comm.queue
    assert scene.group.registered == [1]


def test_a_plan_without_buckets_registers_nothing(scene: Scene) -> None:
    scene.memory.take_over()
    assert scene.group.registered == []


def test_who_cannot_register(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        mem_allocator = object()

        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return device.index == 0

    assert can_register(Group(), torch.device("cuda", 0))
    assert not can_register(Group(), torch.device("cuda", 1))
    assert not can_register(object(), torch.device("cuda", 0))
    monkeypatch.delattr(torch.cuda, "MemPool")
    assert not can_register(Group(), torch.device("cuda", 0))
