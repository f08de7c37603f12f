"""The backend of an optimizer that trains alone as if with many ranks: this process answers for them.

Exchanges take the time of a link and move this process's bytes in its own memory.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

import comm_core
from comm_core.cuda.launchers import launcher_for
from commsched.backends.cpu import EngineBackend
from commsched.backends.cuda import CudaDevice, StreamBackend
from commsched.backends.interface import Backend
from commsched.backends.ranks import Ranks
from commsched.env import settings
from scheduler.ir.actions import Kind
from scheduler.ir.link import Link


def emulated_ranks(size: int) -> Any:
    """A process set of so many ranks, this process being the first."""
    return SimpleNamespace(ranks=None, size=lambda: size, rank=lambda: 0, included=lambda: True)


class OneProcess(Ranks):
    """Ranks that all have this process's values, so they always agree."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(process_set)
        self.own = slice(0, self.size)

    def share(self, value: Any) -> Any:
        return value

    def all_values(self, value: Any) -> list[Any]:
        return [value] * self.size

    def agree(self, what: str, value: str, advice: str) -> None:
        pass


class HostLink:
    """The exchange of the CPU's engine: every rank has the values and the shard of this one."""

    def __init__(self, ranks: Ranks, link: Link | None) -> None:
        self.rank, self.size, self._link = ranks.rank, ranks.size, link

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        self._take(Kind.RS, full)
        torch.mul(full[: shard.numel()], self.size, out=shard)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        self._take(Kind.AG, full)
        full.view(self.size, -1).copy_(shard)

    def sum(self, full: torch.Tensor, name: str) -> None:
        self._take(Kind.AR, full)
        full.mul_(self.size)

    def _take(self, kind: Kind, full: torch.Tensor) -> None:
        if self._link is not None:
            time.sleep(self._link.cost(kind, full.nbytes))


class DeviceLink:
    """The exchange of a GPU: it holds its communication stream for the link's time."""

    name, scales = "EMULATED", False

    def __init__(self, device: CudaDevice, link: Link, ranks: int) -> None:
        self._device, self._link, self._ranks = device, link, ranks
        self._launcher = launcher_for(device.device)
        self._landing: dict[int, torch.Tensor] = {}

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._hold(Kind.RS, bucket)
        bucket.mul_(self._ranks)

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._hold(Kind.AG, bucket)
        landing = self._landing.get(bucket.data_ptr())
        if landing is None or landing.shape != bucket.shape:
            landing = self._landing[bucket.data_ptr()] = torch.empty_like(bucket)
        landing.copy_(bucket)

    def _hold(self, kind: Kind, bucket: torch.Tensor) -> None:
        seconds, device = self._link.cost(kind, bucket.nbytes), self._device
        if self._launcher is not None:
            number, stream = int(device.device.index or 0), device.current().cuda_stream
            self._launcher.launch("hold", number, 1, (round(seconds * 1e9),), stream)
        else:
            # Cycles of a clock that changes: coarse, but there without nvcc and CuPy.
            rate = torch.cuda.get_device_properties(device.device).clock_rate * 1e3
            torch.cuda._sleep(round(seconds * rate))

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def emulated_backend(name: str, link: Link, size: int) -> Backend:
    """The backend of a device over this link, for ``transport=``. On a GPU, flags take no time."""
    ranks = OneProcess(emulated_ranks(size))
    timeout, cuda = settings().timeout, name.startswith("cuda")
    host = HostLink(ranks, None if cuda else link)
    engine = EngineBackend(ranks, "EMULATED", comm_core.PythonTransport(host), timeout)
    if not cuda:
        return engine
    device = CudaDevice(torch.device(name))
    return StreamBackend(engine, device, DeviceLink(device, link, size), timeout=timeout)


def check_device(name: str) -> None:
    """``ValueError`` for a CUDA device where there is none."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device here; --device cpu runs the same with the CPU's compute and timer"
        )
