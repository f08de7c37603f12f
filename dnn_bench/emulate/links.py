"""Collectives that take the time of a link and move this process's bytes in its own memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from comm_core.cuda.launchers import launcher_for
from commsched.backends.cuda_device import CudaDevice, Device, Event, Stream
from scheduler.ir.actions import Kind
from scheduler.ir.link import Link


class Mark:
    """An event of ``ThreadDevice``: the time at which the thread or the host reached it."""

    def __init__(self) -> None:
        self.time = 0.0
        self._passed = threading.Event()

    def pass_(self) -> None:
        self.time = time.monotonic()
        self._passed.set()

    @property
    def passed(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        self._passed.wait()


class ThreadDevice(Device):
    """The CPU with one stream besides: a thread that runs what it is given, in order. Waiting blocks
    the host.
    """

    asynchronous = True

    def __init__(self) -> None:
        self.device, self.comm = torch.device("cpu"), "thread"
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._current = threading.local()
        self._thread = threading.Thread(target=self._run, name="emulated-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()

    def put(self, act: Callable[[], None]) -> None:
        self._queue.put(act)

    def current(self) -> Stream:
        return "host"

    def record(self, stream: Stream) -> Event:
        mark = Mark()
        if stream == self.comm:
            self.put(mark.pass_)
        else:
            mark.pass_()
        return mark

    def wait(self, stream: Stream, event: Event) -> None:
        if stream == self.comm:
            self.put(event.wait)
        else:
            event.wait()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def has_passed(self, event: Event) -> bool:
        return bool(event.passed)

    def moment(self, event: Event) -> float:
        event.wait()
        return float(event.time)

    def uses(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class Timer:
    """Keep the current stream busy for some seconds."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._launcher = launcher_for(device.device) if isinstance(device, CudaDevice) else None

    def hold(self, seconds: float) -> None:
        device = self._device
        if isinstance(device, ThreadDevice):
            device.put(lambda: time.sleep(seconds))
        elif self._launcher is not None:
            number, stream = int(device.device.index or 0), device.current().cuda_stream
            self._launcher.launch("hold", number, 1, (round(seconds * 1e9),), stream)
        else:
            # Cycles of a clock that changes: coarse, but there without nvcc and CuPy.
            rate = torch.cuda.get_device_properties(device.device).clock_rate * 1e3
            torch.cuda._sleep(round(seconds * rate))


class EmulatedCollectives:
    """Every rank is taken to have this process's gradients, so a sum is the own value times the ranks."""

    name, scales = "EMULATED", False

    def __init__(self, device: Device, link: Link, ranks: int) -> None:
        self._device, self._link, self._ranks = device, link, ranks
        self._timer = Timer(device)
        self._landing: dict[int, torch.Tensor] = {}

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._take(Kind.RS, bucket)
        self._move(lambda: bucket.mul_(self._ranks))

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._take(Kind.AG, bucket)
        landing = self._landing.get(bucket.data_ptr())
        if landing is None or landing.shape != bucket.shape:
            landing = self._landing[bucket.data_ptr()] = torch.empty_like(bucket)
        self._move(lambda: landing.copy_(bucket))

    def _take(self, kind: Kind, bucket: torch.Tensor) -> None:
        self._timer.hold(self._link.cost(kind, bucket.numel() * bucket.element_size()))

    def _move(self, act: Callable[[], Any]) -> None:
        if isinstance(self._device, ThreadDevice):
            self._device.put(act)
        else:
            act()

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
