"""Move a device's buckets: by NCCL in the stream, or by a CPU transport through the host.

Both work in place on a flat bucket: after ``reduce_scatter`` this rank's shard holds the sum, ``all_gather``
fills in the others' shards. ``all_to_all`` exchanges the messages of quantised buckets. ``PeerConnections``
notices that another rank is gone while NCCL waits for it.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from comm_core import TcpConnection
from commsched.backends.cpu import make_transport
from commsched.backends.ranks import Ranks
from commsched.collectives.carrier import carrier
from commsched.collectives.private_groups import private_group
from commsched.env import settings
from commsched.errors import CommError
from commsched.process.groups import device_name, nccl_usable

_FAREWELL = b"!"
_HEAD_START = 0.3  # seconds; NCCL is told of an abort at its begin
_ABORT_SECONDS = 10.0


class Exchange(Protocol):
    """``scales``: whether ``reduce_scatter`` applies ``postscale``; otherwise the bucket must come scaled."""

    name: str
    scales: bool

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None: ...

    def all_gather(self, bucket: torch.Tensor) -> None: ...

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        """Send each rank its part of ``message``; receive every rank's part for this one, in rank order."""

    def abort(self, reason: str) -> None:
        """End operations in flight, because another rank is gone. May be called from any thread."""

    def close(self) -> None:
        """Close the group's connections. No operation may be in flight."""


class NcclGroup:
    """Runs in the current stream; the host never waits. ``group`` is a ``ProcessGroupNCCL`` of its own."""

    def __init__(self, group: Any, *options: Any) -> None:
        self.group = group
        self._end_lock, self._ended = threading.Lock(), False
        for each in options:
            # Use the caller's stream; older versions of torch use their own stream and join it.
            if hasattr(each, "asyncOp"):
                each.asyncOp = False

    def _wait_in_stream(self, work: Any) -> None:
        if work is not None:
            work.wait()  # the host does not wait

    def abort(self, reason: str) -> None:
        group = self.group  # close() may drop it meanwhile
        if self._is_first_end() and hasattr(group, "abort"):
            group.abort()

    def close(self) -> None:
        group, self.group = self.group, None
        if self._is_first_end():
            group.shutdown()

    def _is_first_end(self) -> bool:
        """Return whether this is the first call: abort and close may come from two threads."""
        with self._end_lock:
            first, self._ended = not self._ended, True
            return first


class NcclExchange(NcclGroup):
    name, scales = "nccl", False

    def __init__(self, group: Any) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._reduce = ReduceScatterOptions()
        self._gather, self._swap = AllgatherOptions(), AllToAllOptions()
        super().__init__(group, self._reduce, self._gather, self._swap)

    def _shard(self, bucket: torch.Tensor) -> torch.Tensor:
        part = bucket.numel() // self._size
        return bucket.narrow(0, self._rank * part, part)

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        self._wait_in_stream(self.group._reduce_scatter_base(self._shard(bucket), bucket, self._reduce))

    def all_gather(self, bucket: torch.Tensor) -> None:
        self._wait_in_stream(self.group._allgather_base(bucket, self._shard(bucket), self._gather))

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        self._wait_in_stream(self.group.alltoall_base(received, message, [], [], self._swap))


class NcclDirection(NcclGroup):
    """Messages from the first rank of a group of two to the second one.

    A message is a broadcast, which torch runs on the caller's stream; ``send`` and ``recv``, which move the
    same bytes, on one of the group.
    """

    def __init__(self, group: Any) -> None:
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        super().__init__(group, self._options)

    def move(self, buffer: torch.Tensor) -> None:
        try:
            self._wait_in_stream(self.group.broadcast([buffer], self._options))
        except torch.distributed.DistError as error:
            raise CommError(f"a message over NCCL failed: {error}") from error

    @staticmethod
    def can_tell() -> bool:
        """Return whether this torch can say that NCCL has failed: 2.6 cannot."""
        return torch.distributed.is_nccl_available() and hasattr(
            torch.distributed.ProcessGroupNCCL, "get_error"
        )

    def failure(self) -> str:
        """Return why messages may not have arrived, "" if they have; torch's watchdog finds out."""
        group = self.group
        state = "SUCCESS" if group is None else group.get_error().name
        return "" if state == "SUCCESS" else f"a message over NCCL failed or is late: {state}"


def abort_in_turn(first: Sequence[NcclGroup], then: Sequence[NcclGroup], reason: str) -> None:
    """Abort groups whose kernels wait for each other's, ``first`` with a head start.

    NCCL ends an aborted message without its bytes, and the computation that waits for it goes on. So
    directions to other ranks end before those from them, or wrong values would leave. torch waits in
    ``abort()`` until the group's kernels are over, and these may wait for those of another group.
    """
    threads = []
    for groups in (first, then):
        for group in groups:
            threads.append(threading.Thread(target=group.abort, args=(reason,), daemon=True))
            threads[-1].start()
        time.sleep(_HEAD_START)
    for thread in threads:
        thread.join(_ABORT_SECONDS)


class StagedExchange:
    """Runs through the host's memory and a CPU transport, and blocks; for CPU tensors and shared GPUs."""

    name, scales = "staged", True

    def __init__(self, transport: Any) -> None:
        self._transport, self._steps = transport, itertools.count(1)

    def reduce_scatter(self, bucket: torch.Tensor, postscale: float) -> None:
        staged = bucket.cpu()  # the bucket itself, if that is on the CPU
        self._transport.reduce_scatter(staged, postscale=postscale, step=next(self._steps))
        bucket.copy_(staged)

    def all_gather(self, bucket: torch.Tensor) -> None:
        staged = bucket.cpu()
        self._transport.all_gather(staged, step=next(self._steps))
        bucket.copy_(staged)

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor) -> None:
        """Gather the whole messages of all ranks: several times the bytes, in this exchange for tests."""
        rank, size = self._transport.rank, self._transport.size
        messages = message.new_empty((size, size, message.numel() // size))
        messages[rank] = message.view(size, -1)
        self.all_gather(messages.view(-1))
        received.view(size, -1).copy_(messages[:, rank])

    def abort(self, reason: str) -> None:
        if (transport := self._transport) is not None:
            transport.abort(reason)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close("the optimizer is closed")


def exchange_for(ranks: Ranks, device: torch.device, channel: int) -> Exchange:
    """Return NCCL's exchange if every rank has a GPU of its own, else the one through the host."""
    example = torch.empty(0, dtype=torch.uint8, device=device)
    names = ranks.all_values(device_name((example,), carrier().launch.node))
    if nccl_usable(names):
        return NcclExchange(private_group(ranks.process_set, channel, "cuda"))
    _, transport = make_transport("auto", ranks.process_set, channel, settings().timeout)
    return StagedExchange(transport)


class PeerConnections:
    """Notices that another rank is gone while this rank's host waits for its GPU.

    In ``loss.item()`` the host waits for kernels that wait for another rank, and reads no connection. The
    failure monitor's thread probes these connections, which carry no data but a farewell message.

    ``connections``: one for each rank, None for this one; ``other_failure`` returns other failures."""

    def __init__(
        self,
        rank: int,
        connections: Sequence[TcpConnection | None],
        other_failure: Callable[[], str | None],
    ) -> None:
        self._rank, self._other_failure = rank, other_failure
        # Descriptors are not closed while another thread polls them. Reentrant: the collector may free the
        # backend, which closes them, in a thread that polls.
        self._lock = threading.RLock()
        self._poll = select.poll()
        self._peers = {  # by descriptor; each peer has two
            handle.fileno(): (peer, one)
            for peer, one in enumerate(connections)
            if one is not None
            for handle in (one.data, one.host.keepalive)
        }
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)

    def problem(self) -> str | None:
        """Return why the exchanges of this rank cannot end, or None. Does not block."""
        with self._lock:
            if not self._peers:
                return None  # closed
            problem = self._other_failure()
            for descriptor, _ in self._poll.poll(0):
                self._poll.unregister(descriptor)
                if not problem and descriptor in self._peers:
                    problem = self._end_of(*self._peers[descriptor])
            return problem

    def _end_of(self, peer: int, connection: TcpConnection) -> str | None:
        """Return what is wrong with a connection that poll() reports; None after a farewell."""
        if lost := connection.host.lost():
            return f"rank {self._rank}: rank {peer} is lost: its {lost}"
        with suppress(OSError):
            if connection.data.recv(1, socket.MSG_PEEK) == _FAREWELL:
                return None
        return (
            f"rank {self._rank}: rank {peer} is gone: its process or its host ended without closing its"
            f" optimizer or pipeline; look at the output of rank {peer}"
        )

    def close(self, farewell: bool) -> None:
        """Close the connections. Without a ``farewell`` the other ranks then abort their waits."""
        with self._lock:
            for _, connection in self._peers.values():
                with suppress(OSError):
                    if farewell:
                        connection.data.send(_FAREWELL)
                connection.data.close()
                connection.host.keepalive.close()
            self._peers.clear()
            self._other_failure = lambda: None  # it holds the engine
