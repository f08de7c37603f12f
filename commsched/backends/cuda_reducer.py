"""Gradients on a device with streams: they stay where autograd put them until their bucket is complete, then
one launch packs the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from commsched.backends.cuda import DeviceWire
from commsched.optimizer.bucket_layout import Buffers
from commsched.optimizer.reducer import Flow
from commsched.optimizer.sharded_reducer import ShardedFlow
from scheduler.ir.program import Program


class _OnDevice(Flow):
    """What differs from the flow on the CPU; mixed in before it."""

    wire: DeviceWire

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._home = self.wire.device.current()

    def _put(self, i: int, grad: torch.Tensor, view: torch.Tensor) -> None:
        if grad.data_ptr() == view.data_ptr():
            self.wire.offer(i, None)
        elif grad.dtype == view.dtype and grad.stride() == view.stride():
            self.wire.offer(i, grad)
        else:
            view.copy_(grad)
            self.wire.offer(i, None)

    def _fill_again(self, i: int, grad: torch.Tensor) -> None:
        if i in self.slots and not any(self.round.sent[b] for b in self.slots[i].buckets):
            offered = self.wire.take_back(i)
            if offered is not None:
                self.views[i].copy_(offered)
        super()._fill_again(i, grad)

    def complete_buckets(self, buckets: Iterable[int]) -> None:
        super().complete_buckets(buckets)
        device = self.wire.device
        current = device.current()
        if current != self._home:
            # Whoever finds a parameter complete later, on the usual stream, does not wait for this one.
            device.wait(self._home, device.record(current))

    def finish_step(self, stepped: bool = True) -> None:
        self._home = self.wire.device.current()
        super().finish_step(stepped)


class DeviceFlow(_OnDevice, Flow):
    """Gradients are gathered, every rank updates everything."""


class DeviceShardedFlow(_OnDevice, ShardedFlow):
    """Each rank updates its shards, parameters are gathered."""

    def install(self, program: Program, buffers: Buffers, gathered: Buffers | None = None) -> None:
        if program.early_step:
            raise ValueError(
                "early_step=True updates from a thread of its own, which has no place in a GPU's streams; use"
                " early_step=False"
            )
        super().install(program, buffers, gathered)
