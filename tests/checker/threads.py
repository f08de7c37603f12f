"""Ranks that are threads of this process, with a network as late as a legal one can be.

This file alone knows how a backend is made. Everything else of the checker uses ``DistributedOptimizer``
and what plain PyTorch offers.
"""

from __future__ import annotations

import math
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

import comm_core
import tests.support.one_process  # noqa: F401
from commsched.backends.cpu import EngineBackend
from commsched.backends.cuda import StreamBackend
from commsched.backends.interface import Backend, StepWork
from commsched.backends.nccl import StagedExchange
from commsched.backends.races import WatchedDevice, WatchedExchange
from commsched.backends.ranks import Ranks
from commsched.devices import Device
from commsched.errors import CommError

# The first unpickling fills a cache of torch's; a second thread would find it half full.
pickle.loads(pickle.dumps(torch.eye(1).to_sparse()))

PATIENCE = 10.0
"""Seconds after which a wait of a rank counts as a hang."""


class Hang(Exception):
    """A rank waited in vain for another one outside of the engine."""


class Meeting:
    """Where the threads of one job exchange objects."""

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self.size, self._slots = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=patience)
        self._channels: dict[int, Sequence[comm_core.TcpChannel]] = {}
        self._made, self._lock = [0] * size, threading.Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        self._slots[rank] = value
        self._wait(rank)
        values = list(self._slots)
        self._wait(rank)
        return values

    def _wait(self, rank: int) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Hang(f"rank {rank} waited in vain for the other ranks") from None

    def channel(self, rank: int) -> comm_core.TcpChannel:
        """Return this rank's end of new connections; the n-th call of every rank meets the n-th of others."""
        with self._lock:
            number = self._made[rank]
            self._made[rank] += 1
            if number not in self._channels:
                self._channels[number] = comm_core.local_channels(self.size)
            return self._channels[number][rank]

    def abort(self) -> None:
        """End every wait with an error."""
        self._barrier.abort()


class Held:
    """What one rank has marked for sending, in all its backends, and the network has not taken."""

    def __init__(self) -> None:
        self._marks: deque[tuple[Callable[[int], None], int]] = deque()
        self._lock = threading.RLock()

    def add(self, mark: Callable[[int], None], bucket: int) -> None:
        with self._lock:
            self._marks.append((mark, bucket))

    def flush(self) -> None:
        with self._lock:
            while self._marks:
                mark, bucket = self._marks.popleft()
                mark(bucket)


class ThreadRanks(Ranks):
    """The agreements among the threads of one job."""

    def __init__(self, meeting: Meeting, rank: int, held: Held) -> None:
        self.meeting, self._held = meeting, held
        size = meeting.size
        process_set: Any = SimpleNamespace(
            rank=lambda: rank, size=lambda: size, included=lambda: True, ranks=None, process_set_id=0
        )
        super().__init__(process_set)

    def arrive(self, has_joined: bool, seconds: float = math.inf) -> Future[bool]:
        all_here: Future[bool] = Future()
        all_here.set_result(False)
        return all_here

    def all_values(self, value: Any) -> list[Any]:
        self._held.flush()
        return [pickle.loads(text) for text in self.meeting.exchange(self.rank, pickle.dumps(value))]

    def add_up(self, tensor: torch.Tensor, name: str) -> None:
        values = self.all_values(tensor.clone())
        tensor.copy_(torch.stack(values).sum(0))

    def reduce_sparse(
        self, grad: torch.Tensor | None, like: torch.Tensor, name: str, mean: bool
    ) -> torch.Tensor:
        with torch.device("cpu"):  # where it unpickles, whatever default the program has set
            present = [
                g for g in self.all_values(None if grad is None else grad.detach().clone()) if g is not None
            ]
            total = present[0] if present[0].is_sparse else present[0].to_sparse(1)
            for other in present[1:]:
                total = total + (other if other.is_sparse else other.to_sparse(1))
            return (total / self.size if mean else total).coalesce()


class LateBackend(Backend):
    """Another backend, made anew after each ``close()``, on a network that delivers late.

    With ``lateness`` above 0 nothing moves before this rank waits for something, which is as late as data may
    arrive, and ``is_gathered`` says so of data that has arrived, each time with that probability.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        ranks: Ranks,
        held: Held | None = None,
        lateness: float = 0.0,
        dice: random.Random | None = None,
    ) -> None:
        self._make, self.ranks, self._lateness = make, ranks, lateness
        self._dice = dice or random.Random(0)
        self._held = held or Held()
        self._inner: Backend | None = None
        inner = self.inner
        self.name, self.device = inner.name, inner.device
        self.can_step_early, self.uneven_parts = inner.can_step_early, inner.uneven_parts
        self.by_rows, self.puts_off = inner.by_rows, inner.puts_off
        self.has_streams = inner.has_streams

    @property
    def inner(self) -> Backend:
        if self._inner is None:
            self._inner = self._make()
        return self._inner

    def __getattr__(self, name: str) -> Any:
        """Offer what else the backend has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _mark(self, mark: Callable[[int], None], bucket: int) -> None:
        if self._lateness:
            self._held.add(mark, bucket)
        else:
            mark(bucket)

    def zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.zeros(length, dtype, device)

    def install(self, work: StepWork) -> None:
        self._held.flush()
        self.inner.install(work)

    def begin_step(self) -> None:
        self._held.flush()
        self.inner.begin_step()

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        self.inner.put(param, grad, slot)

    def take_back(self, param: int, slot: torch.Tensor) -> None:
        self.inner.take_back(param, slot)

    def reads(self, tensor: torch.Tensor) -> None:
        self.inner.reads(tensor)

    def mark_ready(self, bucket: int) -> None:
        self._mark(self.inner.mark_ready, bucket)

    def mark_updated(self, bucket: int) -> None:
        self._mark(self.inner.mark_updated, bucket)

    def wait_reduced(self, bucket: int) -> None:
        self._held.flush()
        self.inner.wait_reduced(bucket)

    def wait_gathered(self, bucket: int) -> None:
        self._held.flush()
        self.inner.wait_gathered(bucket)

    def is_gathered(self, bucket: int) -> bool:
        if self._lateness and self._dice.random() < self._lateness:
            return False
        self._held.flush()
        return self.inner.is_gathered(bucket)

    def step_ended(self) -> None:
        self.inner.step_ended()

    def updates_issued(self) -> None:
        self.inner.updates_issued()

    def enter(self) -> None:
        self.inner.enter()

    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        self._held.flush()
        self.inner.gather_now(buffer, ends)

    def exchange_seconds(self, size: int) -> float:
        return 1e-4 + size * 1e-9

    def events(self, clear: bool = True) -> Any:
        return self.inner.events(clear)

    def now(self) -> Any:
        return self.inner.now()

    def seconds(self, mark: Any) -> float | None:
        return self.inner.seconds(mark)

    def watch(self) -> Any:
        return self.inner.watch()

    def failure(self) -> str | None:
        return self._inner.failure() if self._inner is not None else None

    def abort(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.abort(reason)

    def close(self, orderly: bool = True) -> None:
        if self._inner is not None:
            with suppress(CommError):
                self._held.flush()
            self._inner.close(orderly)
            self._inner = None


def late_backend(
    meeting: Meeting,
    rank: int,
    stream: bool,
    held: Held,
    lateness: float,
    dice: random.Random,
    patience: float = PATIENCE,
    watched: WatchedDevice | None = None,
) -> LateBackend:
    """Return the backend of one optimizer of one thread.

    ``stream``: the GPU's way, for CPU tensors, on the ``watched`` device if there is one.
    """
    ranks, size = ThreadRanks(meeting, rank, held), meeting.size

    def transport() -> Any:
        made = comm_core.DirectTransport(meeting.channel(rank), rank, size)
        made.set_timeout(patience)
        return made

    def make() -> Backend:
        host = EngineBackend(ranks, "threads", transport(), patience)
        if not stream:
            return host
        device, exchange = Device(torch.device("cpu")), StagedExchange(transport())
        if watched is None:
            return StreamBackend(host, device, exchange, timeout=patience)
        return StreamBackend(host, watched, WatchedExchange(exchange, watched.races), timeout=patience)

    return LateBackend(make, ranks, held, lateness, dice)


def run_threads(size: int, work: Callable[[int], Any], patience: float) -> list[Any]:
    """Return the results of ``work(rank)`` on a thread for each rank; ``work`` must not raise."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    if any(thread.is_alive() for thread in threads):
        raise Hang(f"rank {[t.is_alive() for t in threads].index(True)} did not end within {patience:g} s")
    return results
