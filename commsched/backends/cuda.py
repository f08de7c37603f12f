"""One optimizer's connection to the other ranks on a device with streams.

Buckets travel in-stream (``StreamPlan``). The flags, which say what every rank's host has done, stay on the
host: the CPU engine reduces them, so that reading them never waits for the device, and a rank that is gone is
noticed by the others' hosts while their devices hang.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from comm_core.cuda import BucketCopy, Region
from commsched.backends.cpu import Wire, _channels, _padded, _plan, ranks_text, translated
from commsched.backends.cuda_collectives import Collectives, NcclCollectives, StagedCollectives
from commsched.backends.cuda_device import Device, Stream, device_of
from commsched.backends.cuda_memory import Memory, RegisteredMemory, can_register
from commsched.backends.cuda_peers import PeerWatch
from commsched.backends.cuda_streams import StreamBucket, StreamPlan
from commsched.backends.transports import make_transport
from commsched.collectives.current_carrier import carrier, epoch
from commsched.collectives.private_groups import data_connections, private_group
from commsched.collectives.process_sets import ProcessSet, registered_id
from commsched.collectives.torch_carrier.operation import device_name
from commsched.env import settings
from commsched.errors import CommError
from commsched.optimizer.bucket_layout import Buffers, Slice
from commsched.process.groups import nccl_usable
from scheduler.ir.program import Program

_TIMED_EXCHANGES = 5
# Seconds that a script that ends with an exception waits for its GPU: other ranks may never come.
_PATIENCE_AFTER_AN_ERROR = 5.0


class DeviceWire(Wire):
    """As ``Wire``, but marks and waits concern streams: the host returns at once."""

    _failure: str | None = None
    _watch: PeerWatch | None = None

    def __init__(
        self,
        process_set: ProcessSet,
        transport: str | None,
        device: torch.device,
        prescale: float,
        postscale: float,
        wire_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(process_set, transport, prescale, postscale, wire_dtype)
        self._flags_engine = self.engine
        self.device: Device = device_of(device)
        self.collectives = self._collectives()
        self.memory = self._memory()
        self.transport_name = f"{self.collectives.name}, flags over {self.transport_name}"
        self.engine: Any = StreamPlan(self.device, self.collectives, self.rank, self.size)
        self._offers: dict[int, torch.Tensor] = {}
        self._streams: dict[int, Stream] = {}
        connections = data_connections(process_set, self._channel)
        self._watch = PeerWatch(self.rank, connections, self._flags_engine.error, self._lose_peer)

    def _collectives(self) -> Collectives:
        """NCCL where every rank has a GPU of its own; made through the store on which the ranks met, under
        whichever launcher.
        """
        self._channel = next(_channels[epoch(), registered_id(self.process_set)])
        example = torch.empty(0, device=self.device.device)
        names = self.all_values(device_name((example,), carrier().launch.node))
        if nccl_usable(names):
            return NcclCollectives(private_group(self.process_set, self._channel, "cuda"))
        _, transport = make_transport("auto", self.process_set, self._channel, self.timeout)
        return StagedCollectives(transport, self.device)

    def _memory(self) -> Memory:
        asked = settings().nccl_register == "1"
        if not isinstance(self.collectives, NcclCollectives):
            if asked:
                _warn_unregistered(f"buckets do not travel over NCCL, but {self.collectives.name}")
            return Memory()
        self.agree("COMMSCHED_NCCL_REGISTER", str(int(asked)), "set it for all of them or for none")
        if not asked:
            return Memory()
        group, device = self.collectives.group, self.device.device
        able = self.all_values(can_register(group, device))
        unable = [rank for rank, can in enumerate(able) if not can]
        if unable:
            _warn_unregistered(f"torch, NCCL or the GPU of {ranks_text(unable)} cannot register memory")
            return Memory()
        return RegisteredMemory(group, self.collectives, self.device, self.timeout)

    # -- failures --------------------------------------------------------------------------------------------

    def _lose_peer(self, reason: str) -> None:
        """In the watch's thread. Where the host waits for the GPU, this ends the wait."""
        self._fail(reason)
        warnings.warn(f"{reason}. What this rank's GPU computed since is wrong", stacklevel=2)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._flags_engine.abort(reason)
        self.memory.forget()
        self.collectives.abort(reason)

    def _check(self) -> None:
        if self._failure is not None:
            raise CommError(self._failure)

    # -- plans -----------------------------------------------------------------------------------------------

    def room(self) -> AbstractContextManager[Any]:
        return self.memory.room()

    def install(
        self, program: Program, buffers: Buffers, params: int, gathered: Buffers | None = None
    ) -> torch.Tensor:
        flags = torch.zeros(_padded(params, self.size), dtype=torch.int32)
        with translated():
            self._flags_engine.wait_all()
            self._flags_engine.clear_buckets()
            self._flags_engine.install([("AR", self._flags_engine.add_bucket(flags, name="flags"))])
        self._buffers = buffers
        # What may be sent last is rounded to the wire's type by packing; then sums must come scaled before.
        buckets = []
        self._copies = []
        for piece in buffers.layout.slices:
            data = buffers.bucket(piece.number)
            kind = self._wire_dtype(data.dtype)
            with self.room():
                wire = torch.zeros_like(data, dtype=kind) if kind not in (None, data.dtype) else None
            gather = None if gathered is None else gathered.bucket(piece.number)
            buckets.append(StreamBucket(data, wire, gather, self.postscale))
            self._copies.append(self._copy_of(piece, buckets[-1]))
        plan = [(op, bucket) for op, bucket in _plan(program, -1, {}) if bucket >= 0]
        self.memory.take_over()
        self.engine.install(plan, buckets)
        return flags

    def _copy_of(self, piece: Slice, bucket: StreamBucket) -> BucketCopy:
        regions = []
        for place, i in enumerate(piece.params):
            slot = self._buffers.layout.slots[i]
            start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
            regions.append(Region(place, start - slot.offset, start - piece.start, stop - start))
        return BucketCopy(regions, bucket.travels, len(piece.params), bucket.data.dtype)

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._check()
        self.engine.begin_step()
        with translated():
            self._flags_engine.begin_step()
        self._offers.clear()
        self._streams.clear()

    def offer(self, param: int, grad: torch.Tensor | None) -> None:
        """The gradient that the parameter's buckets will be filled with; None where it stands in its slot."""
        self._streams[param] = self.device.current()
        if grad is not None:
            self._offers[param] = grad

    def take_back(self, param: int) -> torch.Tensor | None:
        return self._offers.pop(param, None)

    def mark_ready(self, bucket: int) -> None:
        """Packs what was offered, on the current stream, and lets the bucket travel behind that."""
        self._check()
        piece = self._buffers.layout.slices[bucket]
        self._join_streams(piece.params)
        scale = self.prescale * (1.0 if self.collectives.scales else self.postscale)
        if (
            scale != 1.0
            or self.engine.buckets[bucket].wire is not None
            or self._offers.keys() & set(piece.params)
        ):
            with torch.no_grad():
                self._copies[bucket].pack([self._source(i) for i in piece.params], scale)
        self.engine.mark_ready(bucket)
        for i in piece.params:
            if bucket == self._buffers.layout.slots[i].buckets[-1]:
                self._offers.pop(i, None)

    def _source(self, param: int) -> torch.Tensor:
        offered = self._offers.get(param)
        if offered is not None:
            return offered
        slot = self._buffers.layout.slots[param]
        return self._buffers.flat[slot.group].narrow(0, slot.offset, slot.numel)

    def _join_streams(self, params: Sequence[int]) -> None:
        """Gradients may come from several streams: the current one waits for the others."""
        current = self.device.current()
        for stream in dict.fromkeys(self._streams[i] for i in params if i in self._streams):
            if stream != current:
                self.device.wait(current, self.device.record(stream))
                for i in params:
                    if i in self._offers and self._streams[i] == stream:
                        self.device.uses(self._offers[i], current)

    def mark_updated(self, bucket: int) -> None:
        self.engine.mark_updated(bucket)

    def wait_reduced(self, bucket: int) -> None:
        self._check()
        self.engine.wait_reduced(bucket)

    def wait_gathered(self, bucket: int) -> None:
        self._check()
        self.engine.wait_gathered(bucket)

    def is_gathered(self, bucket: int) -> bool:
        return bool(self.engine.is_gathered(bucket))

    # -- flags, on the host ----------------------------------------------------------------------------------

    def mark_flags_ready(self) -> None:
        with translated():
            self._flags_engine.mark_ready(0)

    def wait_flags(self) -> None:
        try:
            with translated():
                self._flags_engine.wait_ag(0)
        except CommError as error:
            self._fail(str(error))
            raise

    def flags_arrived(self) -> bool:
        with translated():
            return bool(self._flags_engine.ag_done(0))

    # -- outside of the plan ---------------------------------------------------------------------------------

    def gather_now(self, buffer: torch.Tensor) -> None:
        self._check()
        if buffer.device.type == self.device.device.type:
            self.engine.gather_now(buffer)
        else:
            super().gather_now(buffer)

    def exchange_seconds(self, size: int) -> float:
        """Seconds of one RS or AG of a message of so many bytes, several of them behind each other."""
        unit = self.size * 64
        data = torch.zeros(-(-size // (4 * unit)) * unit, device=self.device.device)
        device, collectives = self.device, self.collectives
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

    def close(self, orderly: bool = True) -> None:
        """Waits for what travels; the group's connections and memory are given back. ``orderly``: without an
        exception, so that the other ranks do their part.
        """
        patience = self.timeout if orderly else min(_PATIENCE_AFTER_AN_ERROR, self.timeout)
        if self._failure is None and not self.device.finished(patience):
            self._fail(f"rank {self.rank}: the GPU did not end its communication within {patience:g} s")
        try:
            self.memory.close()
        finally:
            if self._watch is not None:
                self._watch.close(farewell=orderly and self._failure is None)
            self._flags_engine.close()
            self.collectives.close()


def _warn_unregistered(reason: str) -> None:
    warnings.warn(f"COMMSCHED_NCCL_REGISTER=1 without effect: {reason}", stacklevel=2)
