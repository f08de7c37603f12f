"""The memory of a device's buckets: torch's, or registered with NCCL (COMMSCHED_NCCL_REGISTER=1).

NCCL uses registered memory in place: fewer blocks of the GPU carry a collective, and a switch may do the
sums. Every rank must use the same places of its registered memory in a collective. So each plan has a pool of
its own, which is filled in the order of the plan's layout and therefore alike on all ranks.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from commsched.backends.cuda_collectives import Collectives, NcclCollectives
from commsched.backends.cuda_device import Device
from commsched.backends.ranks import Ranks, ranks_text
from commsched.env import settings
from commsched.errors import CommError

_PATIENCE_AT_THE_END = 5.0  # seconds


class Memory:
    """torch's memory, which needs no registration."""

    def room(self) -> AbstractContextManager[Any]:
        """Return the context in which the next plan's buckets are allocated."""
        return nullcontext()

    def take_over(self) -> None:
        """Free the former plan's buckets, after those of the next plan were allocated."""

    def forget(self) -> None:
        """Drop the registrations, which ended when the group was aborted."""

    def close(self) -> None:
        """Free registered memory."""


def can_register(group: Any, device: torch.device) -> bool:
    """Return whether torch, NCCL and the GPU can register memory with the ``ProcessGroupNCCL``."""
    known = hasattr(torch.cuda, "MemPool") and hasattr(group, "mem_allocator")
    return known and bool(group.supports_tensor_alloc(device))


class RegisteredMemory(Memory):
    """Memory registered with ``group``, a ``ProcessGroupNCCL``."""

    def __init__(self, group: Any, collectives: Collectives, device: Device, timeout: float) -> None:
        self._group, self._device, self._timeout = group, device, timeout
        self._next: Any = None  # the pool that is being filled
        self._registered: Any = None
        # NCCL connects with the first collective and registers only once it is connected.
        with device.on(device.comm), torch.no_grad():
            collectives.all_gather(torch.zeros(group.size(), device=device.device))

    def room(self) -> AbstractContextManager[Any]:
        if self._next is None:
            self._next = self._new_pool()
        return self._within(self._next)

    def take_over(self) -> None:
        if not self._give_back(self._timeout):
            raise CommError(
                f"rank {self._group.rank()}: the GPU did not end its communication in {self._timeout:g} s,"
                " so that a new plan cannot start; is another rank gone? (COMMSCHED_TIMEOUT sets the time)"
            )
        if self._next is not None:
            self._group.register_mem_pool(self._next)
        self._registered, self._next = self._next, None

    def forget(self) -> None:
        self._registered = None

    def close(self) -> None:
        # Wait briefly: after an exception other ranks may never join. Closing the group deregisters too.
        self._give_back(min(_PATIENCE_AT_THE_END, self._timeout))

    def _give_back(self, patience: float) -> bool:
        """Free the former pool, but wait for the communication stream first, whose operations use it."""
        if self._registered is None:
            return True
        if not self._device.finished(patience):
            return False
        self._group.deregister_mem_pool(self._registered)
        self._registered = None
        return True

    def _new_pool(self) -> Any:
        return torch.cuda.MemPool(self._group.mem_allocator)

    def _within(self, pool: Any) -> AbstractContextManager[Any]:
        return torch.cuda.use_mem_pool(pool, self._device.device)


def memory_for(ranks: Ranks, collectives: Collectives, device: Device, timeout: float) -> Memory:
    asked = settings().nccl_register == "1"
    if not isinstance(collectives, NcclCollectives):
        if asked:
            _warn_unregistered(f"buckets do not travel over NCCL, but {collectives.name}")
        return Memory()
    ranks.agree("COMMSCHED_NCCL_REGISTER", str(int(asked)), "set it for all of them or for none")
    if not asked:
        return Memory()
    able = ranks.all_values(can_register(collectives.group, device.device))
    unable = [rank for rank, can in enumerate(able) if not can]
    if unable:
        _warn_unregistered(f"torch, NCCL or the GPU of {ranks_text(unable)} cannot register memory")
        return Memory()
    return RegisteredMemory(collectives.group, collectives, device, timeout)


def _warn_unregistered(reason: str) -> None:
    warnings.warn(f"COMMSCHED_NCCL_REGISTER=1 without effect: {reason}", stacklevel=2)
