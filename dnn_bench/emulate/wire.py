"""The backend of an optimizer that trains alone as if with many ranks: this process answers for them."""

from __future__ import annotations

from typing import Any

import torch

import comm_core
from commsched.backends.cpu import EngineBackend
from commsched.backends.cuda import StreamBackend
from commsched.backends.cuda_device import CudaDevice, Device
from commsched.backends.ranks import Ranks
from commsched.env import settings
from dnn_bench.emulate.links import EmulatedCollectives, ThreadDevice
from scheduler.ir.link import Link


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


class OneProcess(Ranks):
    """Ranks that all have this process's values, so they always agree."""

    def share(self, value: Any) -> Any:
        return value

    def all_values(self, value: Any) -> list[Any]:
        return [value] * self.size

    def agree(self, what: str, value: str, advice: str) -> None:
        pass


class _Flags:
    """The collectives behind the flags: every rank has the flags of this one."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size

    def sum(self, full: torch.Tensor, name: str) -> None:
        full.mul_(self.size)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        pass


def emulated_backend(device: Device, link: Link, size: int) -> StreamBackend:
    """A GPU's backend over this link; pass it as ``transport=``."""
    ranks = OneProcess(EmulatedRanks(size))  # type: ignore[arg-type]
    timeout = settings().timeout
    flags = EngineBackend(ranks, "EMULATED", comm_core.PythonTransport(_Flags(ranks)), timeout)
    return StreamBackend(flags, device, EmulatedCollectives(device, link, size), timeout=timeout)


def device_for(name: str) -> Device:
    """``cuda`` or ``cpu``; a clear error where there is no GPU."""
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(
                "there is no CUDA device here; --device cpu runs the same with the CPU's compute and timer"
            )
        return CudaDevice(torch.device(name))
    return ThreadDevice()
