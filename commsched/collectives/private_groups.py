"""Private connections between ranks for the optimizer and pipelines: c10d groups, TCP channels and boards."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore

import comm_core
from commsched.collectives.carrier import carrier, epoch
from commsched.collectives.job import ProcessSet, global_process_set, registered_id
from commsched.collectives.operations import dumps, loads
from commsched.collectives.torch_carrier import algorithms
from commsched.collectives.torch_carrier.algorithms import ChannelGroup
from commsched.env import settings
from commsched.errors import CommError
from commsched.process import groups
from commsched.process.groups import gloo_group, nccl_group

_groups: dict[tuple[int, int, str, int], Any] = {}
_calls: defaultdict[tuple[int, str, int, int], Iterator[int]] = defaultdict(itertools.count)


def data_group(
    process_set: ProcessSet = global_process_set, *, device: str | torch.device = "cpu", channel: int = 0
) -> Any:
    """Return a private c10d backend over the ranks of `process_set`; the first call is collective.

    A raw backend object: ``ProcessGroupGloo`` for `device` "cpu", ``ProcessGroupNCCL`` for "cuda" (call
    ``torch.cuda.set_device`` before). Usable from C++ as ``c10d::Backend``. Ranks within it are
    ``process_set.rank()``. It does not depend on the launcher and on what carries the collectives, and is not
    torch.distributed's default group. Each `channel` is an independent group with its own connections.
    """
    set_id, kind = registered_id(process_set), torch.device(device).type
    key = (epoch(), set_id, kind, channel)
    if key not in _groups:
        _groups[key] = _new_group(set_id, kind, str(channel))
    return _groups[key]


def private_group(process_set: ProcessSet, channel: int, device: str = "cpu") -> Any:
    """Return a new group, which closes when its last reference goes. Collective, each time."""
    set_id = registered_id(process_set)
    call = next(_calls[epoch(), "group", set_id, channel])
    return _new_group(set_id, device, f"private/{channel}/{call}")


def _new_group(set_id: int, kind: str, channel: str) -> Any:
    members, place = _members_and_place(set_id)
    meeting = carrier().meeting
    store = PrefixStore("data", meeting.store)
    name = f"{set_id}/{'-'.join(map(str, members))}/{kind}/{channel}"
    if kind == "cpu":
        return gloo_group(store, name, place, members, meeting.address)
    return nccl_group(store, name, place, members)


class PrivateObjects:
    """Gathers objects over connections of its own, so that ranks can take part that have called ``join()``.

    A carrier takes a rank that has joined for one that submits nothing until all have.
    """

    def __init__(self, process_set: ProcessSet, channel: int) -> None:
        """Connect the ranks of the process set. Collective."""
        name, members = _new_name("agreements", process_set, channel)
        place = members.index(carrier().launch.rank)
        self._group = ChannelGroup(messages_between(name, members, settings().timeout), place, len(members))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        group, data = self._group, dumps(value)
        try:
            lengths = algorithms.allgather(
                group, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), [1] * group.size
            ).tolist()
            gathered = algorithms.allgather(group, data, lengths)
        except RuntimeError as error:
            raise CommError(
                f"rank {group.rank} of {group.size}: an agreement among the ranks of an optimizer failed"
                f" while some of them have called join(): {error}; look for the first error in the other"
                " ranks' output"
            ) from error
        return [loads(part) for part in gathered.split(lengths)]


def data_channel(process_set: ProcessSet = global_process_set, *, channel: int = 0) -> comm_core.TcpChannel:
    """Return new TCP connections between the ranks of `process_set`. Collective, each time."""
    return _connected(comm_core.tcp_channel, process_set, channel)


def data_connections(process_set: ProcessSet, channel: int) -> list[comm_core.TcpConnection | None]:
    """Return one new connection per rank (None for this rank), which shows that the other host is lost.

    Collective, each time.
    """
    return _connected(comm_core.tcp_connections, process_set, channel)


def ranks_of(process_set: ProcessSet = global_process_set) -> list[int]:
    """Return the process set's ranks by their numbers in the job."""
    return _members_and_place(registered_id(process_set))[0]


def hosts_of(process_set: ProcessSet = global_process_set) -> list[int]:
    """Return the host of each rank of the process set: see ``hosts_of_ranks``."""
    return hosts_of_ranks(ranks_of(process_set))


def hosts_of_ranks(ranks: Sequence[int]) -> list[int]:
    """Return the host of each of these ranks of the job, numbered from 0 in the order of their first ranks.

    These are the launcher's facts: emulated hosts are on one machine. Raises ``ValueError`` where the facts
    contradict each other; every rank has the same facts.
    """
    records = carrier().meeting.records
    by_node = defaultdict(list)
    for record in records:
        by_node[record.node].append(record.local_rank)
    for node, local_ranks in by_node.items():
        if sorted(local_ranks) != list(range(len(local_ranks))):
            raise ValueError(
                f"the {len(local_ranks)} ranks on host {node!r} must have the local ranks 0 to"
                f" {len(local_ranks) - 1}, but the launcher gave them {sorted(local_ranks)}"
            )
    number: dict[str, int] = {}
    return [number.setdefault(records[rank].node, len(number)) for rank in ranks]


def data_board(link: comm_core.TcpChannel, ranks: Sequence[int]) -> comm_core.TwoTierTransport:
    """Return the exchange in two tiers over connections between these ranks and new boards. Collective.

    Raises ``comm_core.NotShared`` on every rank where the ranks of a host cannot share memory, and
    ``ValueError`` like ``hosts_of_ranks``.
    """
    place, hosts = list(ranks).index(carrier().launch.rank), hosts_of_ranks(ranks)
    return comm_core.two_tier_transport(link, place, hosts, timeout_seconds=settings().timeout)


def tier_exchanges(
    process_set: ProcessSet, channel: int
) -> tuple[comm_core.Transport, comm_core.Transport] | None:
    """Return an exchange among the ranks of this host, and one among those of this rank's place on all hosts.

    None where there is one tier, or hosts have different numbers of ranks. Collective, each time.
    """
    name, members = _new_name("tier", process_set, channel)
    rank, hosts = members.index(carrier().launch.rank), hosts_of(process_set)
    if not 1 < len(set(hosts)) < len(hosts) or len({hosts.count(host) for host in hosts}) > 1:
        return None
    by_host = [[other for other, host in enumerate(hosts) if host == each] for each in sorted(set(hosts))]
    mine, timeout = by_host[hosts[rank]], settings().timeout
    place = mine.index(rank)
    same_place = [ranks[place] for ranks in by_host]
    links = [
        connected(comm_core.tcp_channel, f"{name}/{kind}", [members[other] for other in group], timeout)
        for kind, group in ((f"host {hosts[rank]}", mine), (f"place {place}", same_place))
    ]
    inside = comm_core.two_tier_transport(links[0], place, [0] * len(mine), timeout_seconds=timeout)
    between = comm_core.DirectTransport(links[1], same_place.index(rank), len(same_place))
    between.set_timeout(timeout)
    return inside, between


def _connected(connect: Callable[..., Any], process_set: ProcessSet, channel: int) -> Any:
    name, members = _new_name("tcp", process_set, channel)
    return connected(connect, name, members, settings().timeout)


def _new_name(kind: str, process_set: ProcessSet, channel: int) -> tuple[str, list[int]]:
    """Return a name for connections that are about to be made, the same on all ranks; and those ranks."""
    set_id = registered_id(process_set)
    members, _ = _members_and_place(set_id)
    call = next(_calls[epoch(), kind, set_id, channel])
    return f"{kind}/{set_id}/{'-'.join(map(str, members))}/{channel}/{call}", members


def messages_between(name: str, ranks: Sequence[int], timeout: float) -> comm_core.MessageChannel:
    """Return a new channel of messages between these ranks of the job: see ``process.groups``."""
    return groups.messages_between(carrier().meeting, name, ranks, timeout)


def nccl_between(name: str, ranks: Sequence[int], device: torch.device, blocks: int) -> Any:
    """Return a new NCCL group of these ranks of the job: see ``process.groups``. Collective."""
    meeting = carrier().meeting
    store, place = PrefixStore("data", meeting.store), list(ranks).index(meeting.launch.rank)
    with torch.cuda.device(device):
        return nccl_group(store, name, place, ranks, blocks)


def connected(connect: Callable[..., Any], name: str, ranks: Sequence[int], timeout: float) -> Any:
    """Connect these ranks of the job: see ``process.groups``."""
    return groups.connected(carrier().meeting, connect, name, ranks, timeout)


def _members_and_place(set_id: int) -> tuple[list[int], int]:
    """Return the global ranks of a process set, and this rank's place among them."""
    members, rank = carrier().process_set_ranks(set_id), carrier().launch.rank
    if rank not in members:
        raise ValueError(f"rank {rank} is not in process set {set_id} of ranks {members}")
    return members, members.index(rank)


def release_groups() -> None:
    """Close all groups of ``data_group``; ``shutdown()`` calls this."""
    _groups.clear()
