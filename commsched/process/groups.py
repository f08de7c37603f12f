"""Private c10d process groups: the wires under the engines and the optimizer.

They are backend objects of their own and never touch torch.distributed's default group, which stays the
script's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from commsched.env import settings
from commsched.errors import CommError
from commsched.process import lost_ranks as losses


def gloo_group(store: Store, name: str, rank: int, members: Sequence[int], address: str) -> Any:
    """A gloo group over `store`, listening on `address`; collective over `members`, ranks of the job.

    `rank` is this one's place among them.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Bound to the address the ranks met on: gloo's own guess is the host name's, often 127.0.1.1 (Debian's
    # /etc/hosts).
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=settings().timeout)
    try:
        group = ProcessGroupGloo(PrefixStore(name, store), rank, len(members), options)
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} of {len(members)} could not connect to the others from {address}: {error}; "
            "GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    losses.add_group(group, members)
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
