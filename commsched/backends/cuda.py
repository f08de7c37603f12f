"""The backend for buckets in a GPU's memory: streams and NCCL move them, and the host does not wait.

The flags, which hold what every rank's host has done, stay on the host and a CPU backend sums them. So
reading them never waits for the GPU, and the hosts notice a lost rank while their GPUs hang.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch

from comm_core.cuda import BucketCopy, Region
from commsched.backends.cpu import engine_backend, new_channel
from commsched.backends.cuda_collectives import Collectives, collectives_for
from commsched.backends.cuda_device import Device, Stream, device_of
from commsched.backends.cuda_memory import Memory, memory_for
from commsched.backends.cuda_peers import PeerConnections
from commsched.backends.cuda_streams import StreamBucket, StreamSchedule
from commsched.backends.interface import Backend, StepWork
from commsched.collectives.private_groups import data_connections
from commsched.collectives.process_sets import ProcessSet
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.bucket_layout import Buffers, Layout, Slice
from commsched.optimizer.layer_timing import Watch
from commsched.process import failure_monitor

_TIMED_EXCHANGES = 5
# Seconds to wait for the GPU after an exception in the script: other ranks may never join a collective.
_PATIENCE_AFTER_AN_ERROR = 5.0
_NO_BUFFERS = Buffers(Layout({}, [], {}), {})


class StreamBackend(Backend):
    """Marks and waits concern streams. ``host`` moves the flags and tensors of the CPU."""

    can_step_early = False  # a thread of its own has no place in a device's streams

    def __init__(
        self,
        host: Backend,
        device: Device,
        collectives: Collectives,
        memory: Memory | None = None,
        peers: PeerConnections | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.host, self.streams, self.collectives = host, device, collectives
        self.ranks, self.device = host.ranks, device.device
        self.name = f"{collectives.name}, flags over {host.name}"
        self.memory = memory or Memory()
        self.schedule = StreamSchedule(device, collectives, self.ranks.rank, self.ranks.size)
        self._peers, self._timeout = peers, timeout
        self._failure: str | None = None
        self._offers: dict[int, torch.Tensor] = {}  # gradients to be packed, by parameter
        self._stream_of: dict[int, Stream] = {}  # where each gradient was computed
        self._home = device.current()

    # -- failures --------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End every wait with an error, also the host's waits for the GPU."""
        self._fail(reason)
        warnings.warn(f"{reason}. What this rank's GPU computed since is wrong", stacklevel=2)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.host.abort(reason)
        self.memory.forget()
        self.collectives.abort(reason)

    def failure(self) -> str | None:
        return self._failure or self.host.failure()

    def _check(self) -> None:
        if self._failure is not None:
            raise CommError(self._failure)

    # -- plans -----------------------------------------------------------------------------------------------

    def room(self) -> AbstractContextManager[Any]:
        return self.memory.room()

    def install(self, work: StepWork) -> None:
        self.host.install(StepWork([("AR", 0)], _NO_BUFFERS, work.flags))
        self._layout, self._flat, self._scaling = work.buffers.layout, work.buffers.flat, work.scaling
        buckets = []
        self._copies = []
        for piece in self._layout.slices:
            data = work.buffers.bucket(piece.number)
            kind = work.scaling.wire_type(data.dtype)
            with self.room():
                wire = torch.zeros_like(data, dtype=kind) if kind not in (None, data.dtype) else None
            gather = None if work.gathered is None else work.gathered.bucket(piece.number)
            buckets.append(StreamBucket(data, wire, gather, work.scaling.after))
            self._copies.append(self._copy_of(piece, buckets[-1]))
        self._first_flags = len(buckets)
        order = [(op, bucket) for op, bucket in work.order if bucket < self._first_flags]
        self.memory.take_over()
        self.schedule.install(order, buckets)

    def _copy_of(self, piece: Slice, bucket: StreamBucket) -> BucketCopy:
        regions = []
        for place, i in enumerate(piece.params):
            slot = self._layout.slots[i]
            start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
            regions.append(Region(place, start - slot.offset, start - piece.start, stop - start))
        return BucketCopy(regions, bucket.travels, len(piece.params), bucket.data.dtype)

    # -- a step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._check()
        self.schedule.begin_step()
        self.host.begin_step()
        self._offers.clear()
        self._stream_of.clear()

    def put(self, param: int, grad: torch.Tensor, slot: torch.Tensor) -> None:
        """Remember the gradient: one launch packs all of a bucket's gradients when the bucket is complete."""
        self._stream_of[param] = self.streams.current()
        if grad.data_ptr() == slot.data_ptr():
            return
        if grad.dtype == slot.dtype and grad.stride() == slot.stride():
            self._offers[param] = grad
        else:
            slot.copy_(grad)

    def take_back(self, param: int, slot: torch.Tensor) -> None:
        offered = self._offers.pop(param, None)
        if offered is not None:
            slot.copy_(offered)

    def mark_ready(self, bucket: int) -> None:
        """Pack the bucket's gradients on the current stream; the bucket is sent behind that."""
        if bucket >= self._first_flags:
            self.host.mark_ready(bucket - self._first_flags)
            return
        self._check()
        piece = self._layout.slices[bucket]
        self._join_streams(piece.params)
        # Packing rounds to the wire's type; sums in it must come scaled before.
        scale = self._scaling.before * (1.0 if self.collectives.scales else self._scaling.after)
        cast = self.schedule.buckets[bucket].wire is not None
        if scale != 1.0 or cast or self._offers.keys() & set(piece.params):
            with torch.no_grad():
                self._copies[bucket].pack([self._source(i) for i in piece.params], scale)
        self.schedule.mark(bucket, "ready")
        for i in piece.params:
            if bucket == self._layout.slots[i].buckets[-1]:
                self._offers.pop(i, None)

    def _source(self, param: int) -> torch.Tensor:
        offered = self._offers.get(param)
        if offered is not None:
            return offered
        slot = self._layout.slots[param]
        return self._flat[slot.group].narrow(0, slot.offset, slot.numel)

    def _join_streams(self, params: Sequence[int]) -> None:
        """Make the current stream wait for every stream on which a gradient was computed."""
        current = self.streams.current()
        for stream in dict.fromkeys(self._stream_of[i] for i in params if i in self._stream_of):
            if stream != current:
                self.streams.wait(current, self.streams.record(stream))
                for i in params:
                    if i in self._offers and self._stream_of[i] == stream:
                        self.streams.uses(self._offers[i], current)

    def mark_updated(self, bucket: int) -> None:
        self.schedule.mark(bucket, "updated")

    def wait_reduced(self, bucket: int) -> None:
        self._check()
        self.schedule.wait(bucket, "reduced")

    def wait_gathered(self, bucket: int) -> None:
        if bucket < self._first_flags:
            self._check()
            self.schedule.wait(bucket, "gathered")
            return
        try:
            self.host.wait_gathered(bucket - self._first_flags)
        except CommError as error:
            self._fail(str(error))
            raise

    def is_gathered(self, bucket: int) -> bool:
        if bucket >= self._first_flags:
            return self.host.is_gathered(bucket - self._first_flags)
        return self.schedule.is_gathered(bucket)

    def step_ended(self) -> None:
        self._home = self.streams.current()

    def updates_issued(self) -> None:
        """Make the stream of the user's steps wait for updates that were started on another stream.

        Code that later finds a parameter complete, on the usual stream, does not wait for it.
        """
        current = self.streams.current()
        if current != self._home:
            self.streams.wait(self._home, self.streams.record(current))

    # -- outside of the steps --------------------------------------------------------------------------------

    def gather_now(self, buffer: torch.Tensor, ends: Sequence[int] = ()) -> None:
        self._check()
        if buffer.device.type == self.device.type:
            self.schedule.gather_now(buffer)
        else:
            self.host.gather_now(buffer)

    def exchange_seconds(self, size: int) -> float:
        """Return the mean duration of several consecutive exchanges."""
        unit = self.ranks.size * 64
        data = torch.zeros(-(-size // (4 * unit)) * unit, device=self.device)
        device, collectives = self.streams, self.collectives
        device.wait(device.comm, device.record(device.current()))
        with device.on(device.comm):
            collectives.reduce_scatter(data, 1.0)
            start = device.record(device.comm)
            for _ in range(_TIMED_EXCHANGES):
                collectives.reduce_scatter(data, 1.0)
                collectives.all_gather(data)
            end = device.record(device.comm)
        began, ended = device.moment(start), device.moment(end)
        return max((ended - began) / (2 * _TIMED_EXCHANGES), 1e-9)

    def events(self, clear: bool = True) -> npt.NDArray[Any]:
        return self.schedule.events(clear)

    def now(self) -> Any:
        return self.streams.record(self.streams.current())

    def seconds(self, mark: Any) -> float | None:
        if self.streams.asynchronous and not self.streams.has_passed(mark):
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
        """Wait for operations in flight, then close the group's connections and free its memory."""
        patience = self._timeout if orderly else min(_PATIENCE_AFTER_AN_ERROR, self._timeout)
        if self._failure is None and not self.streams.finished(patience):
            self._fail(f"rank {self.ranks.rank}: the GPU did not end its communication within {patience:g} s")
        try:
            self.memory.close()
        finally:
            failure_monitor.unregister(self)
            if self._peers is not None:
                self._peers.close(farewell=orderly and self._failure is None)
            self.host.close()
            self.collectives.close()


def stream_backend(process_set: ProcessSet, transport: str | None, device: torch.device) -> StreamBackend:
    """Return a backend over new connections; ``transport`` is for the flags. Collective."""
    host, timeout = engine_backend(process_set, transport), settings().timeout
    streams, channel = device_of(device), new_channel(process_set)
    collectives = collectives_for(host.ranks, streams, channel)
    memory = memory_for(host.ranks, collectives, streams, timeout)
    connections = data_connections(process_set, channel)
    peers = PeerConnections(host.ranks.rank, connections, host.engine.error)
    backend = StreamBackend(host, streams, collectives, memory, peers, timeout)
    failure_monitor.register(backend, process_set.ranks or (), peers.problem)
    return backend
