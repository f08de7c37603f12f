"""Private connections for whoever moves bytes without an engine, such as the optimizer: ``data_group`` over
c10d, ``data_channel`` over TCP."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

import comm_core
from commsched.collectives import state
from commsched.collectives.process_sets import ProcessSet, global_process_set, registered_id
from commsched.env import settings
from commsched.errors import CommError
from commsched.process.groups import gloo_group, nccl_group

_groups: dict[tuple[int, int, str, int], Any] = {}
_calls: defaultdict[tuple[int, int, int], Iterator[int]] = defaultdict(itertools.count)


def data_group(
    process_set: ProcessSet = global_process_set, *, device: str | torch.device = "cpu", channel: int = 0
) -> Any:
    """The c10d backend over the ranks of `process_set`, made on the first call, which every member must make.

    A raw backend object: ``ProcessGroupGloo`` for `device` "cpu", ``ProcessGroupNCCL`` for "cuda" (call
    ``torch.cuda.set_device`` before). Usable from C++ as ``c10d::Backend``. Ranks within it are
    ``process_set.rank()``. It is the same whichever launcher and engine run the job and is no part of
    torch.distributed's default group. A different `channel` gives an independent group (own connections) over
    the same ranks.
    """
    set_id, kind = registered_id(process_set), torch.device(device).type
    key = (state.epoch(), set_id, kind, channel)
    if key not in _groups:
        _groups[key] = _new_group(set_id, kind, str(channel))
    return _groups[key]


def private_group(process_set: ProcessSet, channel: int, device: str = "cpu") -> Any:
    """A group that nobody else gets: it ends with whoever holds it. Collective, each time."""
    set_id = registered_id(process_set)
    call = next(_calls[state.epoch(), set_id, channel])
    return _new_group(set_id, device, f"private/{channel}/{call}")


def _new_group(set_id: int, kind: str, channel: str) -> Any:
    members, place = _place_in(set_id)
    meeting = state.engine().meeting
    store = PrefixStore("data", meeting.store)
    name = f"{set_id}/{'-'.join(map(str, members))}/{kind}/{channel}"
    if kind == "cpu":
        return gloo_group(store, name, place, members, meeting.address)
    return nccl_group(store, name, place, len(members))


def data_channel(process_set: ProcessSet = global_process_set, *, channel: int = 0) -> comm_core.TcpChannel:
    """New TCP connections between the ranks of `process_set`, which every member must ask for.

    Unlike a group they are made anew by every call, since they end with the engine that uses them.
    """
    set_id = registered_id(process_set)
    return _connected(comm_core.tcp_channel, set_id, channel)


def data_connections(process_set: ProcessSet, channel: int) -> list[comm_core.TcpConnection | None]:
    """New connections, one for each rank, that tell when the other host is lost; None for this rank."""
    connections: list[comm_core.TcpConnection | None] = _connected(
        comm_core.tcp_connections, registered_id(process_set), channel
    )
    return connections


def _connected(how: Callable[..., Any], set_id: int, channel: int) -> Any:
    members, place = _place_in(set_id)
    meeting, call = state.engine().meeting, next(_calls[state.epoch(), set_id, channel])
    store = PrefixStore(f"tcp/{set_id}/{'-'.join(map(str, members))}/{channel}/{call}", meeting.store)
    try:
        return how(store, place, len(members), meeting.address, settings().timeout, settings().host_timeout)
    except RuntimeError as error:
        raise CommError(
            f"rank {place} of {len(members)} could not connect to the others from {meeting.address}: "
            f"{error}; COMMSCHED_TRANSPORT=gloo uses torch's connections instead"
        ) from error


def tcp_channel(store: Store, place: int, size: int) -> comm_core.TcpChannel:
    """The channel of the rank at `place` among `size` that share `store`, with this job's settings."""
    address = state.engine().meeting.address
    return comm_core.tcp_channel(store, place, size, address, settings().timeout, settings().host_timeout)


def _place_in(set_id: int) -> tuple[list[int], int]:
    """The global ranks of a process set, and this rank's place among them."""
    engine = state.engine()
    members = engine.process_set_ranks(set_id)
    if engine.launch.rank not in members:
        raise ValueError(f"rank {engine.launch.rank} is not in process set {set_id} of ranks {members}")
    return members, members.index(engine.launch.rank)


def release_groups() -> None:
    """Close every data group (``shutdown()`` does)."""
    _groups.clear()
