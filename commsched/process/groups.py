"""Connections among some ranks of a job: channels of messages, and private c10d process groups.

The groups are c10d backend objects outside of torch.distributed's registry, whose default group is the
script's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

import comm_core
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import failure_monitor
from commsched.process.rendezvous import Meeting

_groups: WeakSet[Any] = WeakSet()
_GRACE_SECONDS = 10.0  # after gloo's own time-out, whose error says more
_HINT = "GLOO_SOCKET_IFNAME names the network interface to use"


def gloo_group(store: Store, name: str, rank: int, ranks: Sequence[int], address: str) -> Any:
    """Return a gloo group of the job's `ranks`, which meet in `store`. Each of them must call.

    `rank` is this process's index in `ranks`; it listens on `address`.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo listens on the address of the host's name, which Debian's /etc/hosts sets to 127.0.1.1.
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=settings().timeout)
    # Gloo's time-out does not end a question to a store that is stopped.
    patience = settings().timeout + _GRACE_SECONDS
    waiting = comm_core.Waiting(rank, patience, lambda _: failure_monitor.lost(ranks))
    arguments = PrefixStore(name, store), rank, len(ranks), options
    try:
        group = comm_core.ask_store(waiting, ProcessGroupGloo, *arguments)
    except RuntimeError as error:
        where = f"rank {rank} of {len(ranks)} could not connect to the others from {address}"
        raise CommError(f"{where}: {error}; {_HINT}") from error
    _groups.add(group)
    return group


def connected(
    meeting: Meeting, connect: Callable[..., Any], name: str, ranks: Sequence[int], timeout: float
) -> Any:
    """Call ``comm_core.tcp_channel`` or ``tcp_connections`` for these ranks of the job. Collective.

    `name` must be new. The wait ends when the failure monitor learns that one of them is lost, or that one
    whose connection is missing has left.
    """
    place, store = list(ranks).index(meeting.launch.rank), PrefixStore(name, meeting.store)
    told = ""  # why the wait has ended

    def lost(awaited: Iterable[int]) -> str:
        nonlocal told
        told = failure_monitor.lost(ranks, [ranks[other] for other in awaited])
        return told

    try:
        return connect(store, place, len(ranks), meeting.address, timeout, settings().host_timeout, lost)
    except RuntimeError as error:
        where = f"rank {place} of {len(ranks)} could not connect to the others from {meeting.address}"
        reason = told or failure_monitor.lost(ranks) or f"{error}; {_HINT}"
        raise CommError(f"{where}: {reason}") from error


def messages_between(
    meeting: Meeting, name: str, ranks: Sequence[int], timeout: float
) -> comm_core.MessageChannel:
    """Return a new channel of messages between these ranks, which ends when one is lost. Collective.

    `name` must be new. A rank's number in it is its place in `ranks`.
    """
    alone = len(ranks) == 1
    connections = [None] if alone else connected(meeting, comm_core.tcp_connections, name, ranks, timeout)
    channel = comm_core.message_channel(connections.index(None), connections, timeout)
    failure_monitor.register(channel, ranks)
    return channel


def nccl_group(store: Store, name: str, rank: int, ranks: Sequence[int], blocks: int | None = None) -> Any:
    """Return a connected NCCL group of the job's `ranks`, which meet in `store`. Each of them must call.

    `rank` is this process's index in `ranks`. Each must have set its own GPU (``torch.cuda.set_device``).
    `blocks`: the most that an operation takes of a GPU.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=settings().timeout)
    if blocks is not None:
        options.config.max_ctas = blocks
    with _abort_instead_of_exit():
        group = ProcessGroupNCCL(PrefixStore(name, store), rank, len(ranks), options)
    # By default the first collective connects: it reads the store and waits for the others without a limit.
    waiting = comm_core.Waiting(
        rank, settings().timeout + _GRACE_SECONDS, lambda _: failure_monitor.lost(ranks)
    )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        comm_core.ask_store(waiting, group.eager_connect_single_device, device)
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} of {len(ranks)} could not connect {device} to the others over NCCL: {error};"
            " NCCL_DEBUG=INFO shows what NCCL does, NCCL_SOCKET_IFNAME names the network interface to use"
        ) from error
    return group


@contextmanager
def _abort_instead_of_exit() -> Iterator[None]:
    """Let groups that are made here abort their communicators when an operation fails or is late.

    By default torch's watchdog ends the process, often before the failure monitor knows who is lost. The
    script's own setting stays. Groups read it when they are made.
    """
    name, clean_up_only = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
    if name in os.environ or "NCCL_ASYNC_ERROR_HANDLING" in os.environ:
        yield
        return
    os.environ[name] = clean_up_only
    try:
        yield
    finally:
        del os.environ[name]


def nccl_usable(devices: list[str]) -> bool:
    """Return whether torch has NCCL and every rank a GPU of its own; `devices` has one name for each rank."""
    return (
        torch.distributed.is_nccl_available()
        and torch.cuda.is_available()
        and "cpu" not in devices
        and len(set(devices)) == len(devices)
    )


def device_name(tensors: Sequence[Tensor], node: str) -> str:
    """Name the tensors' device; two ranks that share a GPU get the same name."""
    if not tensors or tensors[0].device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(tensors[0].device)
    return f"cuda:{node}:{getattr(properties, 'uuid', tensors[0].device.index)}"


def _never_destroy() -> None:
    """Keep the parent's groups alive in a forked child.

    Destroying a group there would remove its sockets from the epoll object that parent and child share, and
    the parent would receive no more messages.
    """
    for group in _groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_never_destroy)
