"""Streams on paper: operations of several ranks, run in any order that streams and events allow.

Host code puts closures onto streams and goes on. ``run`` then executes them one at a time, each time choosing
at random among the streams whose first operation may run. Whatever lacks an event goes wrong for some seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commsched.devices import Device


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False


class FakeStream:
    """A queue of (may it run, what it does)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def put(self, act: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, act))


class FakeDevice(Device):
    """One rank's streams: ``main`` computes, ``side`` too, ``comm`` communicates."""

    asynchronous = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.main, self.side, self.comm = (FakeStream(name) for name in ("main", "side", "comm"))
        self._current = self.main
        self.capturing = False
        self.calls: list[str] = []

    def current(self) -> FakeStream:
        return self._current

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        stream.put(lambda: setattr(event, "passed", True))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.put(lambda: None, lambda: event.passed)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def has_passed(self, event: FakeEvent) -> bool:
        return event.passed

    def moment(self, event: FakeEvent) -> float:
        assert event.passed, "the host must not wait"
        return 0.0

    def uses(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.calls.append(f"{stream.name} uses {tensor.data_ptr()}")

    def is_capturing(self) -> bool:
        return self.capturing

    def compute(self, act: Callable[[], None]) -> None:
        """A kernel on the current stream."""
        self._current.put(act)


class Network:
    """Joins the ranks' exchanges: the n-th of one rank meets the n-th of the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: list[str] = []
        self._met: list[dict[int, tuple[str, torch.Tensor]]] = []

    def arrive(self, rank: int, number: int, op: str, bucket: torch.Tensor) -> None:
        while len(self._met) <= number:
            self._met.append({})
        self._met[number][rank] = op, bucket
        if self.is_over(number):
            ops = {kind for kind, _ in self._met[number].values()}
            assert len(ops) == 1, f"the ranks disagree about collective {number}: {ops}"
            _exchange(op, [self._met[number][r][1] for r in range(self.size)])
            self.order.append(op)

    def is_over(self, number: int) -> bool:
        return len(self._met[number]) == self.size


class FakeExchange:
    """NCCL on paper: an operation keeps its stream until it is done on every rank."""

    name, scales = "fake", False

    def __init__(self, network: Network, rank: int, device: FakeDevice) -> None:
        self._network, self._rank, self._device = network, rank, device
        self._count = 0
        self.aborted = ""

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._put("RS", bucket)

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._put("AG", bucket)

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def close(self) -> None:
        pass

    def _put(self, op: str, bucket: torch.Tensor) -> None:
        number, self._count = self._count, self._count + 1
        stream = self._device.current()
        stream.put(lambda: self._network.arrive(self._rank, number, op, bucket))
        stream.put(lambda: None, lambda: self._network.is_over(number))


class GroupOnPaper:
    """A ``ProcessGroupNCCL`` on paper, over a group for CPU tensors; ``living`` hold a communicator."""

    living: list[GroupOnPaper] = []

    def __init__(self, group: Any) -> None:
        self._group = group
        self.ended = ""
        self.living.append(self)

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def _reduce_scatter_base(self, shard: torch.Tensor, bucket: torch.Tensor, options: Any) -> Any:
        return self._group._reduce_scatter_base(shard, bucket.clone(), options)

    def _allgather_base(self, bucket: torch.Tensor, shard: torch.Tensor, options: Any) -> Any:
        return self._group._allgather_base(bucket, shard.clone(), options)

    def alltoall_base(self, received: torch.Tensor, message: torch.Tensor, *rest: Any) -> Any:
        return self._group.alltoall_base(received, message, *rest)

    def shutdown(self) -> None:
        self._end("shut down")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        assert not self.ended, f"{how}, but {self.ended} already"
        self.ended = how
        self.living.remove(self)


def _exchange(op: str, tensors: list[torch.Tensor]) -> None:
    shards = [tensor.chunk(len(tensors)) for tensor in tensors]
    for owner in range(len(tensors)):
        if op == "RS":
            total = torch.stack([shards[rank][owner] for rank in range(len(tensors))]).sum(0)
            for rank in range(len(tensors)):
                # What others keep of this shard is worth nothing.
                shards[rank][owner].copy_(total if rank == owner else torch.full_like(total, float("nan")))
        else:
            for rank in range(len(tensors)):
                shards[rank][owner].copy_(shards[owner][owner])


def run(devices: list[FakeDevice], seed: int) -> None:
    """Until every stream is empty; an ``AssertionError`` where they wait for each other."""
    choice = random.Random(seed)
    while True:
        streams = [s for d in devices for s in (d.main, d.side, d.comm) if s.queue]
        if not streams:
            return
        runnable = [stream for stream in streams if stream.queue[0][0]()]
        assert runnable, f"a deadlock: {[(s.name, len(s.queue)) for s in streams]}"
        choice.choice(runnable).queue.popleft()[1]()
