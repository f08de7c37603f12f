"""The wire of an optimizer that believes in many ranks: this process answers for all of them."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from commsched.backends.cuda import DeviceWire
from commsched.backends.cuda_device import CudaDevice, Device
from commsched.backends.cuda_memory import Memory
from commsched.backends.cuda_planner import DevicePlanner
from commsched.backends.cuda_reducer import DeviceFlow, DeviceShardedFlow
from commsched.backends.cuda_streams import StreamPlan
from commsched.backends.cuda_timing import DeviceWatch
from commsched.env import settings
from commsched.optimizer.backend_choice import Path
from dnn_bench.emulate.links import EmulatedCollectives, ThreadDevice
from scheduler.ir.link import Link

T = TypeVar("T")


class EmulatedRanks:
    """A process set of so many ranks, this process being the first."""

    ranks = None

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def included(self) -> bool:
        return True


class _Flags:
    """As much of the CPU engine as flags need: what this rank flags, every rank does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def wait_all(self) -> None:
        pass

    def clear_buckets(self) -> None:
        pass

    def add_bucket(self, flags: torch.Tensor, name: str) -> int:
        self._flags = flags
        return 0

    def install(self, plan: Any) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def mark_ready(self, bucket: int) -> None:
        stepped = self._flags[self._tail :].clone()
        self._flags.mul_(self._size)
        # One of these for each rank: all have stepped when this one has.
        self._flags[self._tail :] = stepped[0]

    def tell_params(self, params: int) -> None:
        self._tail = params - self._size

    def wait_ag(self, bucket: int) -> None:
        pass

    def ag_done(self, bucket: int) -> bool:
        return True

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class EmulatedWire(DeviceWire):
    """Buckets go over an emulated link; agreement is found at once."""

    def __init__(self, ranks: EmulatedRanks, link: Link, device: Device, scales: tuple[Any, ...]) -> None:
        self.process_set: Any = ranks
        self.rank, self.size = 0, ranks.size()
        self.prescale, self.postscale, self.wire_dtype = scales
        self.timeout = settings().timeout
        self.device = device
        self._flags_engine: Any = _Flags(self.size)
        self.collectives = EmulatedCollectives(device, link, self.size)
        self.memory = Memory()
        self.transport_name = "EMULATED"
        self.engine = StreamPlan(device, self.collectives, 0, self.size)
        self._offers, self._streams = {}, {}

    def install(self, program: Any, buffers: Any, params: int, gathered: Any = None) -> torch.Tensor:
        self._flags_engine.tell_params(params)
        return super().install(program, buffers, params, gathered)

    def share(self, value: T) -> T:
        return value

    def all_values(self, value: T) -> list[T]:
        return [value] * self.size

    def agree(self, what: str, value: str, advice: str) -> None:
        pass

    def gather_now(self, buffer: torch.Tensor) -> None:
        pass


def emulated_path(device: Device, link: Link) -> Path:
    """In the place of ``transport=``: the GPU's way, with this link under it."""

    def wire(ranks: EmulatedRanks, transport: Any, *scales: Any) -> EmulatedWire:
        return EmulatedWire(ranks, link, device, scales)

    return Path(
        device.device,
        wire,
        DevicePlanner,
        DeviceFlow,
        DeviceShardedFlow,
        lambda wire: DeviceWatch(wire.device),
    )


def device_for(name: str) -> Device:
    """``cuda`` or ``cpu``; a clear error where there is no GPU."""
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(
                "there is no CUDA device here; --device cpu runs the same with the CPU's compute and timer"
            )
        return CudaDevice(torch.device(name))
    return ThreadDevice()
