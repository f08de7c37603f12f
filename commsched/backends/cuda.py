"""The backend for buckets in a GPU's memory: streams and NCCL move them, and the host does not wait.

- ``Device``: streams and events. ``CudaDevice`` uses torch's; ``Device`` itself serves CPU tensors.
- ``StreamSchedule``: the operations of a step on the communication stream, in the plan's order.
- ``StreamBackend``: the backend. The flags, which hold what every rank's host has done, stay on the host and
  a CPU backend sums them. So reading them never waits for the GPU, and the hosts notice a lost rank while
  their GPUs hang.

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

import logging
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from comm_core import OPS, EngineError, write_into
from comm_core.cuda import BlockCode, BucketCopy, Region, message_bytes
from commsched.backends.cpu import closed_text, engine_backend, new_channel
from commsched.backends.interface import Backend, StepWork, as_real
from commsched.backends.nccl import Exchange, PeerConnections, exchange_for
from commsched.collectives.job import ProcessSet
from commsched.collectives.private_groups import data_connections
from commsched.devices import Device, Event, Stream, device_of
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.buckets import Buffers, Layout, Slice
from commsched.optimizer.measuring import Watch
from commsched.process import failure_monitor

# Seconds to wait for the GPU after an exception in the script: other ranks may never join a collective.
_PATIENCE_AFTER_AN_ERROR = 5.0
_TIMED_EXCHANGES = 5
_KEPT_OPERATIONS = 1 << 13

_NO_BUFFERS = Buffers(Layout({}, [], {}), {})
# What an exchange raises when another rank is gone or the backend was aborted.
_FAILURES = (EngineError, torch.distributed.DistError, CommError)

_log = logging.getLogger("commsched")

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
class Quantised:
    """How a bucket travels in blocks of bytes: a message has a part for, or of, each rank.

    ``lost`` is what rounding this rank's gradients has lost so far, ``lost_of_sums`` the sums of its shard.
    The engine rounds ``prescale`` times the gradients, so they are packed unscaled.
    """

    code: BlockCode
    message: torch.Tensor
    received: torch.Tensor
    lost: torch.Tensor
    lost_of_sums: torch.Tensor | None
    prescale: float


@dataclass
class StreamBucket:
    """``data`` is reduced (as ``wire``, if that has another type); ``gather``, else ``data``, is gathered.

    ``packed``: the factor with which gradients are packed.
    """

    data: torch.Tensor
    wire: torch.Tensor | None = None
    gather: torch.Tensor | None = None
    packed: float = 1.0
    postscale: float = 1.0
    quantised: Quantised | None = None
    events: dict[str, Event] = field(default_factory=dict)  # ready, reduced, updated, gathered

    @property
    def travels(self) -> torch.Tensor:
        return self.data if self.wire is None else self.wire

    def sent(self, op: str, ranks: int) -> int:
        """Return the bytes that a rank sends in an operation: all parts but its own."""
        reduced = (self.travels if self.quantised is None else self.quantised.message).nbytes
        gathered = reduced if self.gather is None else self.gather.nbytes
        return ((op != "AG") * reduced + (op != "RS") * gathered) // ranks * (ranks - 1)


class StreamSchedule:
    """Puts the operations of every step onto a device's communication stream, in one order."""

    def __init__(self, device: Device, exchange: Exchange, rank: int, size: int) -> None:
        self.device, self.exchange = device, exchange
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

    def close(self) -> None:
        """Drop the buckets, and the events of the log."""
        self.install((), ())
        self._log.clear()
        self._last = None

    def begin_step(self) -> None:
        self._refuse_capture()
        self.check_ended()
        self.step += 1
        self._next = 0
        for bucket_ in self.buckets:
            bucket_.events.clear()

    def _refuse_capture(self) -> None:
        """Raise while a CUDA graph is recorded, before anything that would spoil the recording.

        Once it is spoiled, torch raises an error of its own in the place of this one.
        """
        if self.device.is_capturing():
            raise CommError(
                f"rank {self.rank}: a step with commsched cannot be captured into a CUDA graph: in every step"
                " the ranks' hosts tell each other which parameters were used, and a graph has no host;"
                " capture the model's forward and backward without the optimizer's hooks, or use one rank"
            )

    def check_ended(self) -> None:
        """Raise unless all operations of the step were started."""
        if self._next < len(self.order):
            op, bucket = self.order[self._next]
            raise CommError(
                f"rank {self.rank}: step {self.step} ended before {op} of bucket {bucket} was started"
            )

    # -- hand-overs, from the thread that computes -----------------------------------------------------------

    def mark(self, bucket: int, what: str) -> None:
        """Allow a ``ready`` or ``updated`` bucket to be sent after all operations on the current stream."""
        if what in self.buckets[bucket].events:
            raise ValueError(
                f"rank {self.rank}: a bucket is marked {what} once in each step, but bucket {bucket} was"
                f" marked twice in step {self.step}"
            )
        self.buckets[bucket].events[what] = self.device.record(self.device.current())
        after = self._input()
        if after is None:
            return
        with self.device.on(self.device.comm), torch.no_grad():
            while after is not None:
                op, number = self.order[self._next]
                self._next += 1
                self._start(op, number, after)
                after = self._input()

    def _input(self) -> Event | None:
        """Return the mark of the next operation's input; None while it has not been made."""
        if self._next == len(self.order):
            return None
        op, number = self.order[self._next]
        bucket = self.buckets[number]
        gathers = "reduced" if bucket.gather is None else "updated"
        return bucket.events.get("ready" if op != "AG" else gathers)

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
        """All-gather outside of the plan, after all operations started so far. Collective."""
        device, current = self.device, self.device.current()
        device.wait(device.comm, device.record(current))
        with device.on(device.comm), torch.no_grad():
            self.exchange.all_gather(buffer)
        device.wait(current, device.record(device.comm))
        device.uses(buffer, device.comm)

    def is_gathered(self, bucket: int) -> bool:
        """Return whether the device has gathered the bucket."""
        self._refuse_capture()
        event = self.buckets[bucket].events.get("gathered")
        return event is not None and self.device.has_passed(event)

    # -- operations ------------------------------------------------------------------------------------------

    def _start(self, op: str, number: int, after: Event) -> None:
        """Put the operation onto the communication stream, which is the current one."""
        device, bucket = self.device, self.buckets[number]
        device.wait(device.comm, after)
        if op != "AG":
            self._reduce(bucket)
        if op != "RS":
            self._gather(bucket)
        end = device.record(device.comm)
        if op != "AG":
            bucket.events["reduced"] = end
        if op != "RS":
            bucket.events["gathered"] = end
        before = after if self._last is None else self._last
        self._log.append((self.step, op, number, after, before, end, bucket.sent(op, self.size)))
        self._last = end

    def _reduce(self, bucket: StreamBucket) -> None:
        if (blocks := bucket.quantised) is not None:
            blocks.code.quantise(bucket.data, blocks.lost, blocks.message, blocks.prescale)
            self.exchange.all_to_all(blocks.received, blocks.message)
            blocks.code.add_up(blocks.received, self.size, self._shard(bucket.data), bucket.postscale)
            return
        self.exchange.reduce_scatter(bucket.travels, bucket.postscale)
        if bucket.wire is not None and bucket.gather is not None:
            self._shard(bucket.data).copy_(self._shard(bucket.wire))

    def _gather(self, bucket: StreamBucket) -> None:
        if bucket.gather is not None:
            self.exchange.all_gather(bucket.gather)
            return
        if (blocks := bucket.quantised) is not None:
            blocks.code.quantise(self._shard(bucket.data), blocks.lost_of_sums, self._shard(blocks.message))
            self.exchange.all_gather(blocks.message)
            blocks.code.add_up(blocks.message, 1, bucket.data)  # this rank's rounded sums, too
            return
        self.exchange.all_gather(bucket.travels)
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


def _reads_like(grad: torch.Tensor, slot: torch.Tensor) -> bool:
    """Return whether both read memory in the same way: ``p.grad.t()`` and ``p.grad.conj()`` do not."""
    alike = grad.stride() == slot.stride() and grad.dtype == slot.dtype
    return alike and not (grad.is_conj() or grad.is_neg())


@dataclass(slots=True)
class Offer:
    """A gradient where autograd has written it, and how many buckets are still to be packed from it."""

    grad: torch.Tensor
    unread: int


class Packing:
    """Writes the gradients of a step into their buckets: one launch for all gradients of a bucket.

    [Note: lifetime of a gradient]
    A gradient is offered where autograd has written it, and each bucket that holds a part of it is packed
    from there. A tensor may lie in several buckets, which are marked in any order::

        put(t)              the offer holds the gradient; nothing is copied
        mark_ready(1)       bucket 1 is packed from it on stream P, after the stream on which it was computed
        mark_ready(0)       so is bucket 0, the last one: the offer is dropped

    Dropping the last reference lets torch's allocator give the memory to a later operation on the stream of
    the gradient. Where that is not P, ``Device.uses`` (record_stream) makes the allocator wait for P. The
    stream of a gradient is the current one in ``put()``, unless autograd has added it to an earlier gradient,
    in memory that a backward on any other stream may have allocated. Such a tensor has a version above 0.

    A gradient that cannot be packed as it lies in memory (another type or order, an unresolved conjugate, or
    memory of the buckets themselves, which other buckets overwrite) is copied into its slot at once.

    Slots and buckets are written on any stream, but not before the step before this one has done with them.
    The stream that begins the step waits for that; each other stream waits for that moment before it first
    writes here.
    """

    def __init__(self, device: Device, buffers: Buffers, buckets: Sequence[StreamBucket]) -> None:
        self._device, self._layout = device, buffers.layout
        self._scales = [bucket.packed for bucket in buckets]
        # Where the buckets' memory begins and ends.
        self._memory = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in buffers.flat.values()]
        self._slots = {
            i: as_real(buffers.flat[slot.group].narrow(0, slot.offset, slot.numel))
            for i, slot in buffers.layout.slots.items()
        }
        self._complex = {
            i for i, slot in buffers.layout.slots.items() if buffers.flat[slot.group].is_complex()
        }
        self._copies = [self._copy_of(*pair) for pair in zip(buffers.layout.slices, buckets, strict=True)]
        # Whether a bucket is packed even if all of its gradients are in their slots.
        self._changes = [bucket.packed != 1.0 or bucket.wire is not None for bucket in buckets]
        self._offers: dict[int, Offer] = {}
        self._written_on: dict[int, Stream] = {}  # where each gradient was computed, or its slot written
        self._packed: set[int] = set()
        self._began_on: Stream = device.current()
        self._begun: Event = device.record(self._began_on)
        self._entered: set[Stream] = set()

    def _copy_of(self, piece: Slice, bucket: StreamBucket) -> BucketCopy:
        regions = []
        for place, i in enumerate(piece.params):
            slot, numbers = self._layout.slots[i], 2 if i in self._complex else 1
            start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
            fields = start - slot.offset, start - piece.start, stop - start
            regions.append(Region(place, *(numbers * field for field in fields)))
        return BucketCopy(regions, bucket.travels, len(piece.params), bucket.data.dtype)

    def begin(self) -> None:
        """Begin a step: the current stream may write into all slots."""
        self._offers.clear()
        self._written_on.clear()
        self._packed.clear()
        self._entered.clear()
        self._began_on = self._device.current()
        self._begun = self._device.record(self._began_on)

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        self._check_unsent(param)
        current = self._device.current()
        if param in self._written_on:
            self._follow((param,), current)
        self._offers.pop(param, None)
        if not grad.is_inference() and grad._version:
            self._device.uses(grad, current)
        if self._can_stay(grad, slot):
            self._offers[param] = Offer(grad, len(self._layout.slots[param].buckets))
        elif not (grad.data_ptr() == slot.data_ptr() and _reads_like(grad, slot)):
            self._enter(current)
            write_into(slot, grad)
        self._written_on[param] = current

    def _can_stay(self, grad: torch.Tensor, slot: torch.Tensor) -> bool:
        address = grad.data_ptr()
        for start, stop in self._memory:
            if start <= address < stop:
                return False
        return _reads_like(grad, slot)

    def take_back(self, param: int, slot: torch.Tensor) -> None:
        self._check_unsent(param)
        current = self._device.current()
        self._enter(current)
        self._follow((param,), current)
        offer = self._offers.pop(param, None)
        if offer is not None:
            slot.copy_(offer.grad)
            self._has_read(param, offer, current)
        self._written_on[param] = current

    def _check_unsent(self, param: int) -> None:
        if self._packed.isdisjoint(self._layout.slots[param].buckets):
            return
        bucket = next(b for b in self._layout.slots[param].buckets if b in self._packed)
        raise ValueError(
            f"a gradient may change until the first of its buckets is marked ready, but bucket {bucket},"
            f" which holds parameter {param}, was marked in this step"
        )

    def pack(self, bucket: int) -> None:
        """Write the bucket's gradients into what travels, on the current stream."""
        params, current = self._layout.slices[bucket].params, self._device.current()
        self._enter(current)
        self._follow(params, current)
        offers = [self._offers.get(i) for i in params]
        if self._changes[bucket] or any(offers):
            sources = [
                self._slots[i] if offer is None else self._real(i, offer)
                for i, offer in zip(params, offers, strict=True)
            ]
            with torch.no_grad():
                self._copies[bucket].pack(sources, self._scales[bucket])
        self._packed.add(bucket)
        for i, offer in zip(params, offers, strict=True):
            if offer is not None:
                self._has_read(i, offer, current)
                offer.unread -= 1
                if not offer.unread:
                    del self._offers[i]

    def _real(self, param: int, offer: Offer) -> torch.Tensor:
        return torch.view_as_real(offer.grad) if param in self._complex else offer.grad

    def _enter(self, current: Stream) -> None:
        """Let the current stream, which is to write here, wait for the step's begin."""
        if current != self._began_on and current not in self._entered:
            self._device.wait(current, self._begun)
            self._entered.add(current)

    def _follow(self, params: Sequence[int], current: Stream) -> None:
        """Let the current stream wait for those on which these gradients were written."""
        for stream in dict.fromkeys(self._written_on[i] for i in params if i in self._written_on):
            if stream != current:
                self._device.wait(current, self._device.record(stream))

    def _has_read(self, param: int, offer: Offer, current: Stream) -> None:
        if current != self._written_on[param]:
            self._device.uses(offer.grad, current)


class StreamBackend(Backend):
    """Marks and waits concern streams. ``host`` moves the flags and tensors of the CPU.

    [Note: lifetime of a plan's memory]
    Buckets, residuals, messages and the tables of ``Packing`` are allocated on the stream that installs the
    plan. They are read and written on that of the exchanges, those of the backward, and those that complete
    parameters. Before ``install()`` and ``close()`` drop them, the stream of the allocation waits for all of
    these: the exchanges of a bucket run after it was packed, and ``updates_issued()`` lets the stream of the
    user's steps wait for each stream that has completed parameters.
    """

    can_step_early = False  # a thread of its own has no place in a device's streams

    def __init__(
        self,
        host: Backend,
        device: Device,
        exchange: Exchange,
        peers: PeerConnections | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.host, self.streams, self.exchange = host, device, exchange
        self.ranks, self.device = host.ranks, device.device
        self.puts_off = not device.asynchronous
        self.has_streams = device.asynchronous
        self.name = f"{exchange.name}, flags over {host.name}"
        self.schedule = StreamSchedule(device, exchange, self.ranks.rank, self.ranks.size)
        self._peers, self._timeout = peers, timeout
        self._failure: str | None = None  # the reason of the first failure, or that of the end
        self._closing = self._ended = False
        self._home = self._allocated_on = device.current()
        # Where parameters were completed last, a mark there, and the streams that have waited for that.
        self._updated_on, self._followed = self._home, {self._home}
        self._updated: Event | None = None
        self._no_plan()

    def _no_plan(self) -> None:
        nowhere = Device(torch.device("cpu"))  # asks nothing of a GPU, which may have failed
        self._packing, self._first_flags = Packing(nowhere, _NO_BUFFERS, []), 0

    # -- failures --------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End every wait with an error, also the host's waits for the GPU."""
        if not self._ended:
            self._fail(reason)
            warnings.warn(f"{reason}. What this rank's GPU computed since is wrong", stacklevel=2)

    def _fail(self, reason: str) -> CommError:
        """End every wait; return the error of marks and waits from now on."""
        self._failure = self._failure or reason
        self.host.abort(reason)
        self.exchange.abort(reason)
        return CommError(self._failure)

    def failure(self) -> str | None:
        return self._failure or self.host.failure()

    def _check(self) -> None:
        if self._failure is not None:
            raise CommError(self._failure)

    # -- plans -----------------------------------------------------------------------------------------------

    def install(self, work: StepWork) -> None:
        self._check()
        self.schedule.check_ended()
        self.host.install(StepWork([("AR", 0)], _NO_BUFFERS, work.flags))
        layout, scaling, buckets = work.buffers.layout, work.scaling, []
        # Packing rounds to the wire's type; sums in it must come scaled before.
        scale = scaling.before * (1.0 if self.exchange.scales else scaling.after)
        with self.room():
            quantised = self._quantised(work)
            for piece in layout.slices:
                data, blocks = work.buffers.bucket(piece.number), quantised.get(piece.number)
                kind = scaling.wire_type(data.dtype)
                wire = torch.zeros_like(data, dtype=kind) if kind not in (None, data.dtype) else None
                gather = None if work.gathered is None else as_real(work.gathered.bucket(piece.number))
                packed = scale if blocks is None else 1.0
                buckets.append(StreamBucket(as_real(data), wire, gather, packed, scaling.after, blocks))
            packing = Packing(self.streams, work.buffers, buckets)
        self._first_flags = len(buckets)
        order = [(op, bucket) for op, bucket in work.order if bucket < self._first_flags]
        self._release_after_use()
        self._packing = packing
        self.schedule.install(order, buckets)

    def _quantised(self, work: StepWork) -> dict[int, Quantised]:
        """Return how the quantised buckets travel. Their messages, which come one by one, share memory."""
        lost = work.residuals if self.ranks.size > 1 else {}  # one rank rounds nothing
        if not lost or work.scaling.wire_dtype is None:
            return {}
        device = next(iter(lost.values()))[0].device
        sizes = {number: message_bytes(mine.numel()) for number, (mine, _) in lost.items()}
        memory = torch.empty((2, max(sizes.values())), dtype=torch.uint8, device=device)
        code = BlockCode(work.scaling.wire_dtype, device)
        return {
            number: Quantised(code, memory[0, :size], memory[1, :size], *lost[number], work.scaling.before)
            for number, size in sizes.items()
        }

    def _release_after_use(self) -> None:
        """Let the stream on which the plan's memory was allocated wait for everything that uses it."""
        device, current = self.streams, self.streams.current()
        for stream in dict.fromkeys((device.comm, self._home, current)):
            if stream != self._allocated_on:
                device.wait(self._allocated_on, device.record(stream))
        self._allocated_on = current

    # -- a step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._check()
        self.schedule.begin_step()
        try:
            self.host.begin_step()
        except CommError as error:
            raise self._fail(str(error)) from error
        current = self.streams.current()
        if current != self._home:  # which may have read the slots last
            self.streams.wait(current, self.streams.record(self._home))
        self._packing.begin()

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        """Remember the gradient: one launch packs all of a bucket's gradients when the bucket is complete."""
        self._check()
        self._packing.put(param, grad, slot)

    def take_back(self, param: int, slot: torch.Tensor) -> None:
        self._check()
        self._packing.take_back(param, slot)

    def reads(self, tensor: torch.Tensor) -> None:
        # torch keeps dense memory alone for a stream.
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            self.streams.uses(part, self.streams.current())

    def mark_ready(self, bucket: int) -> None:
        """Pack the bucket's gradients on the current stream; the bucket is sent after that."""
        self._check()
        try:
            if bucket < self._first_flags:
                self._packing.pack(bucket)
                self.schedule.mark(bucket, "ready")
            else:
                self.host.mark_ready(bucket - self._first_flags)
        except _FAILURES as error:
            raise self._fail(str(error)) from error

    def mark_updated(self, bucket: int) -> None:
        self._check()
        try:
            self.schedule.mark(bucket, "updated")
        except _FAILURES as error:
            raise self._fail(str(error)) from error

    def wait_reduced(self, bucket: int) -> None:
        self._check()
        self.schedule.wait(bucket, "reduced")

    def wait_gathered(self, bucket: int) -> None:
        self._check()
        if bucket < self._first_flags:
            self.schedule.wait(bucket, "gathered")
            return
        try:
            self.host.wait_gathered(bucket - self._first_flags)
        except CommError as error:
            raise self._fail(str(error)) from error

    def is_gathered(self, bucket: int) -> bool:
        self._check()
        if bucket >= self._first_flags:
            return self.host.is_gathered(bucket - self._first_flags)
        return self.schedule.is_gathered(bucket)

    def step_ended(self) -> None:
        self._home = self.streams.current()

    def updates_issued(self) -> None:
        """Make the stream of the user's steps wait for updates that were started on another stream.

        Code that later finds a parameter complete, on the usual stream, does not wait for it. Other streams
        wait in ``enter()``: a script that forwards on two streams lets both wait for the step, and not for
        the update, which comes with the first forward.
        """
        self.enter()
        current = self._updated_on = self.streams.current()
        self._updated, self._followed = None, {current}
        if current != self._home:
            self._updated = self.streams.record(current)
            self.streams.wait(self._home, self._updated)
            self._followed.add(self._home)

    def enter(self) -> None:
        current = self.streams.current()
        if current not in self._followed:
            mark = self.streams.record(self._updated_on) if self._updated is None else self._updated
            self.streams.wait(current, mark)
            self._followed.add(current)

    # -- outside of the steps --------------------------------------------------------------------------------

    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        self._check()
        if buffer.device.type != self.device.type:
            self.host.gather_now(buffer)
            return
        try:
            self.schedule.gather_now(as_real(buffer))
        except _FAILURES as error:
            raise self._fail(str(error)) from error

    def exchange_seconds(self, size: int) -> float:
        """Return the mean duration of several consecutive exchanges."""
        self._check()
        unit = self.ranks.size * 64
        data = torch.zeros(-(-size // (4 * unit)) * unit, dtype=torch.float32, device=self.device)
        device, exchange = self.streams, self.exchange
        device.wait(device.comm, device.record(device.current()))
        try:
            with device.on(device.comm):
                exchange.reduce_scatter(data, 1.0)
                start = device.record(device.comm)
                for _ in range(_TIMED_EXCHANGES):
                    exchange.reduce_scatter(data, 1.0)
                    exchange.all_gather(data)
                end = device.record(device.comm)
        except _FAILURES as error:
            raise self._fail(str(error)) from error
        began, ended = device.moment(start), device.moment(end)  # waits, so that ``data`` may be freed
        return max((ended - began) / (2 * _TIMED_EXCHANGES), 1e-9)

    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        return self.schedule.events(clear)

    def now(self) -> Any:
        return self.streams.record(self.streams.current())

    def seconds(self, mark: Any) -> float | None:
        if not self.streams.has_passed(mark):
            return None
        return self.streams.moment(mark)

    def watch(self) -> Watch:
        """Return a recorder whose moments are marks on the stream.

        The host runs ahead of the GPU and cannot take the times itself. Marks do not separate waits from
        work.
        """
        device = self.streams
        return Watch(lambda: device.record(device.current()), device.moment, sees_waits=False)

    def close(self, orderly: bool = True) -> None:
        """Wait for operations in flight, then close the group's connections and free the plan's memory.

        ``abort()`` ends the wait, because another rank may be lost during it.
        """
        if self._closing:
            return
        self._closing = True
        patience = self._timeout if orderly else min(_PATIENCE_AFTER_AN_ERROR, self._timeout)
        rank, ended = self.ranks.rank, [False]
        if self._failure is None:
            self._attempt(lambda: ended.append(self.streams.finished(patience)))
            if not any(ended):
                reason = f"rank {rank}: the GPU did not end its communication within {patience:g} s"
                self._attempt(partial(self._fail, reason))
        self._ended, farewell = True, orderly and self._failure is None
        self._failure = self._failure or closed_text(rank)
        failure_monitor.unregister(self)
        self._attempt(self._release_after_use)
        if self._peers is not None:
            self._attempt(partial(self._peers.close, farewell))
        self._attempt(self.host.close)
        self._attempt(self.exchange.close)
        self._attempt(self.schedule.close)
        self._attempt(self._no_plan)
        self._peers = None

    def _attempt(self, act: Callable[[], Any]) -> None:
        """Do a part of ``close()``. Its failure, that of a broken GPU say, must not keep the other parts."""
        try:
            act()
        except Exception:
            _log.exception("rank %d: a part of a closed optimizer could not be given back", self.ranks.rank)


def stream_backend(process_set: ProcessSet, transport: str | None, device: torch.device) -> StreamBackend:
    """Return a backend over new connections; ``transport`` is for the flags. Collective."""
    timeout = settings().timeout
    with ExitStack() as undo:  # where a later part fails
        host = engine_backend(process_set, transport)
        undo.callback(host.close)
        streams, channel = device_of(device), new_channel(process_set)
        exchange = exchange_for(host.ranks, device, channel)
        undo.callback(exchange.close)
        connections = data_connections(process_set, channel)
        peers = PeerConnections(host.ranks.rank, connections, host.engine.error)
        backend = StreamBackend(host, streams, exchange, peers, timeout)
        failure_monitor.register(backend, process_set.ranks or (), peers.problem)
        undo.pop_all()
    return backend
