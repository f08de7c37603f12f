"""Private c10d process groups, which carry collectives, halos and buckets.

They are backend objects of their own and never touch torch.distributed's default group, which stays the
script's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from commsched.env import settings
from commsched.errors import CommError

_members: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def members(group: Any) -> frozenset[int]:
    """The job's ranks in a gloo group made here; none for any other group."""
    return _members.get(group, frozenset())


def gloo_group(store: Store, name: str, rank: int, ranks: Sequence[int], address: str) -> Any:
    """A gloo group over `store`, listening on `address`; collective over `ranks` of the job.

    `rank` is this one's place among them.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Bound to the address the ranks met on: gloo's own guess is the host name's, often 127.0.1.1 (Debian's
    # /etc/hosts).
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=settings().timeout)
    try:
        group = ProcessGroupGloo(PrefixStore(name, store), rank, len(ranks), options)
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} of {len(ranks)} could not connect to the others from {address}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    _members[group] = frozenset(ranks)
    return group


def nccl_group(store: Store, name: str, rank: int, size: int) -> Any:
    """An NCCL group over `store`; every rank must have chosen its own GPU with ``torch.cuda.set_device``."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=settings().timeout)
    return ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)


def nccl_usable(devices: list[str]) -> bool:
    """True where NCCL is built in and `devices` (one name per rank) are GPUs, no two of them the same."""
    return (
        torch.distributed.is_nccl_available()
        and torch.cuda.is_available()
        and "cpu" not in devices
        and len(set(devices)) == len(devices)
    )


def _never_destroy() -> None:
    """Keeps the parent's groups alive in a forked child: destroying one would take its sockets out of the
    epoll object that both share, and the parent would hear nothing of its peers any more.
    """
    for reference in _members.keyrefs():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reference()))


os.register_at_fork(after_in_child=_never_destroy)
