"""Puts the collectives of a step onto the communication stream, in the plan's order.

The host enqueues an operation once all earlier ones are enqueued and an event marks its input. The stream
runs the operations one after the other, each after its input's event. A stream that needs a result waits for
the result's event, so that the host never waits::

    backward stream   B3 pack(0)* B2 pack(1)* B1
                               |          |
    comm stream                RS0 ...... RS1 AG1* AG0*
                                                |    |
    forward stream                 F0(waits AG0, update) F1(waits AG1, update)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from comm_core import OPS
from commsched.backends.cuda_collectives import Collectives
from commsched.backends.cuda_device import Device, Event
from commsched.errors import CommError

_KEPT_OPERATIONS = 1 << 13

_RECORD = np.dtype(
    [
        ("step", "i8"),
        ("op", "i4"),
        ("bucket", "i4"),
        ("ready", "f8"),
        ("start", "f8"),
        ("end", "f8"),
        ("bytes", "i8"),
    ]
)


@dataclass
class StreamBucket:
    """``data`` is reduced (as ``wire``, if that has another type); ``gather``, else ``data``, is gathered."""

    data: torch.Tensor
    wire: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    postscale: float = 1.0
    events: dict[str, Event] = field(default_factory=dict)  # ready, reduced, updated, gathered

    @property
    def travels(self) -> torch.Tensor:
        return self.data if self.wire is None else self.wire


class StreamSchedule:
    """Puts the operations of every step onto a device's communication stream, in one order."""

    def __init__(self, device: Device, collectives: Collectives, rank: int, size: int) -> None:
        self.device, self.collectives = device, collectives
        self.rank, self.size = rank, size
        self.order: list[tuple[str, int]] = []
        self.buckets: list[StreamBucket] = []
        self.step = 0
        self._next = 0
        self._last: Event | None = None  # the end of the operation before
        self._log: deque[tuple[int, str, int, Event, Event, Event, int]] = deque(maxlen=_KEPT_OPERATIONS)

    def install(self, order: Sequence[tuple[str, int]], buckets: Sequence[StreamBucket]) -> None:
        """Replace the order of every step, between two steps."""
        self.order, self.buckets = list(order), list(buckets)
        self._next = len(self.order)

    def begin_step(self) -> None:
        if self.device.is_capturing():
            raise CommError(
                f"rank {self.rank}: a step with commsched cannot be captured into a CUDA graph: in every step"
                " the ranks' hosts tell each other which parameters were used, and a graph has no host;"
                " capture the model's forward and backward without the optimizer's hooks, or use one rank"
            )
        if self._next < len(self.order):
            op, bucket = self.order[self._next]
            raise CommError(
                f"rank {self.rank}: step {self.step} ended before {op} of bucket {bucket} was started"
            )
        self.step += 1
        self._next = 0
        for bucket_ in self.buckets:
            bucket_.events.clear()

    # -- hand-overs, from the thread that computes -----------------------------------------------------------

    def mark(self, bucket: int, what: str) -> None:
        """Allow a ``ready`` or ``updated`` bucket to be sent behind all operations on the current stream."""
        self.buckets[bucket].events[what] = self.device.record(self.device.current())
        while self._next < len(self.order):
            op, number = self.order[self._next]
            gathers = "reduced" if self.buckets[number].gather is None else "updated"
            event = self.buckets[number].events.get("ready" if op != "AG" else gathers)
            if event is None:
                return
            self._next += 1
            self._start(op, number, event)

    def wait(self, bucket: int, what: str) -> None:
        """Make the current stream wait until this rank's shard is ``reduced``, or the bucket ``gathered``."""
        event = self.buckets[bucket].events.get(what)
        if event is not None:
            self.device.wait(self.device.current(), event)
        elif self.step:  # before the first step everything is where it belongs
            raise CommError(
                f"rank {self.rank}: bucket {bucket} is waited for and is not {what} in step {self.step}:"
                f" {self._next} of {len(self.order)} operations were started"
            )

    def gather_now(self, buffer: torch.Tensor) -> None:
        """All-gather outside of the plan, behind all operations started so far. Collective."""
        device, current = self.device, self.device.current()
        device.wait(device.comm, device.record(current))
        with device.on(device.comm), torch.no_grad():
            self.collectives.all_gather(buffer)
        device.wait(current, device.record(device.comm))
        device.uses(buffer, device.comm)

    def is_gathered(self, bucket: int) -> bool:
        """Return whether the device has gathered the bucket."""
        event = self.buckets[bucket].events.get("gathered")
        return event is not None and self.device.has_passed(event)

    # -- operations ------------------------------------------------------------------------------------------

    def _start(self, op: str, number: int, after: Event) -> None:
        device, bucket = self.device, self.buckets[number]
        device.wait(device.comm, after)
        with device.on(device.comm), torch.no_grad():
            if op != "AG":
                self._reduce(bucket)
            if op != "RS":
                self._gather(bucket)
            end = device.record(device.comm)
        if op != "AG":
            bucket.events["reduced"] = end
        if op != "RS":
            bucket.events["gathered"] = end
        size = bucket.travels.numel() * bucket.travels.element_size()
        self._log.append(
            (self.step, op, number, after, after if self._last is None else self._last, end, size)
        )
        self._last = end

    def _reduce(self, bucket: StreamBucket) -> None:
        self.collectives.reduce_scatter(bucket.travels, bucket.postscale)
        if bucket.wire is not None and bucket.gather is not None:
            self._shard(bucket.data).copy_(self._shard(bucket.wire))

    def _gather(self, bucket: StreamBucket) -> None:
        if bucket.gather is not None:
            self.collectives.all_gather(bucket.gather)
            return
        self.collectives.all_gather(bucket.travels)
        if bucket.wire is not None:
            bucket.data.copy_(bucket.wire)

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.numel() // self.size
        return tensor.narrow(0, self.rank * part, part)

    # -- the log ---------------------------------------------------------------------------------------------

    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        """Return the operations of earlier steps like ``comm_core.Engine.events()``, in device times."""
        done = [entry for entry in self._log if entry[0] < self.step]
        rows = []
        for step, op, bucket, *marks, size in done:
            ready, before, end = map(self.device.moment, marks)
            # An operation starts when the one before it ends: a mark of its own would cost the host time.
            rows.append((step, OPS.index(op), bucket, ready, max(ready, before), end, size))
        if clear:
            for _ in done:
                self._log.popleft()
        return np.array(rows, _RECORD)
