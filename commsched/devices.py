"""Devices: streams, events and memory. ``CudaDevice`` uses torch's, ``Device`` serves CPU tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Stream = Any
Event = Any

# Seconds. CUDA returns the time between two events in single precision, which is 0.2 ms after an hour.
_LONGEST_SPAN = 5.0
_LOOK_AGAIN = 1e-3


class Device:
    """One device with streams; this class is the CPU, where operations end when their calls return.

    ``comm`` is the stream that all communication runs on. Tests have devices of their own, which run streams
    in any legal order and report accesses that no event orders.
    """

    comm: Stream = "host"
    asynchronous = False  # whether operations end later than their calls

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Stream:
        """Return the stream on which the calling thread computes."""
        return "host"

    def record(self, stream: Stream) -> Event:
        """Put a mark after all operations on the stream and return it."""
        return time.monotonic()

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later operations on the stream run after the mark. Does not block the host."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which operations go onto this stream."""
        return nullcontext()

    def stream(self) -> Stream:
        """Return a new stream."""
        return "host"

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device copies to and from while the host goes on."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def synchronize(self, event: Event) -> None:
        """Let the calling thread wait for the mark."""

    def has_passed(self, event: Event) -> bool:
        """Return whether everything before the mark is done."""
        return True

    def finished(self, patience: float) -> bool:
        """Wait until the communication stream has finished; False after ``patience`` seconds."""
        end, latest = self.record(self.comm), time.monotonic() + patience
        while not self.has_passed(end):
            if time.monotonic() > latest:
                return False
            time.sleep(_LOOK_AGAIN)
        return True

    def moment(self, event: Event) -> float:
        """Wait for the mark; return when it was passed, in seconds of ``time.monotonic()``."""
        return float(event)

    def uses(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do not reuse the tensor's memory before the stream has finished all operations it has now."""

    def is_capturing(self) -> bool:
        """Return whether operations are recorded into a CUDA graph and not run."""
        return False


class CudaDevice(Device):
    """One GPU, with torch's streams."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        # torch finds the current stream of a number sooner than that of a ``torch.device``.
        self._number = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self._number)
        # High priority: a collective's few blocks start as soon as any block of the backward has ended.
        self.comm = torch.cuda.Stream(self.device, priority=-1)
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record(torch.cuda.current_stream(self.device))
        self._start.synchronize()
        self._began = time.monotonic()

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._number)

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # who waits for it leaves the core free
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.device, priority=-1)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def has_passed(self, event: Event) -> bool:
        return bool(event.query())

    def moment(self, event: Event) -> float:
        event.synchronize()
        moment = self._began + self._start.elapsed_time(event) / 1e3
        if moment > self._began + _LONGEST_SPAN:
            self._start, self._began = event, moment
        return moment

    def uses(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def device_of(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else Device(device)
