"""The channel of messages, closed when the interpreter ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence

from torch import Tensor

from comm_core import _C
from comm_core.tcp import TcpConnection, descriptors, local_descriptors


class MessageChannel(_C.MessageChannel):
    """Messages between ranks, over one connection to each, in lanes that do not wait for each other.

    Any thread may start messages and wait for them. The messages of a lane match in the order in which both
    ends start them, and both ends must name the same operation. `docs/engine.md` describes the protocol.
    """

    def __init__(
        self, rank: int, connections: Sequence[tuple[int, int, str]], timeout_seconds: float = 300.0
    ) -> None:
        super().__init__(rank, connections)
        self.set_timeout(timeout_seconds)
        _open.add(self)

    def set_timeout(self, seconds: float) -> None:
        """Set how long a wait lasts in which no byte of its messages moves."""
        self.timeout = seconds
        super().set_timeout(seconds)

    def send(self, peer: int, lane: int, buffers: Sequence[Tensor], operation: str) -> _C.PendingMessages:
        """Start sending one message."""
        return self.exchange([(peer, buffers)], [], lane, operation)

    def receive(self, peer: int, lane: int, buffers: Sequence[Tensor], operation: str) -> _C.PendingMessages:
        """Start receiving one message."""
        return self.exchange([], [(peer, buffers)], lane, operation)


def message_channel(
    rank: int, connections: Sequence[TcpConnection | None], timeout_seconds: float = 300.0
) -> MessageChannel:
    """Return a channel over the connections of `tcp_connections()`, which it takes over."""
    return MessageChannel(rank, descriptors(connections), timeout_seconds)


def local_message_channels(size: int) -> list[MessageChannel]:
    """Return connected channels for `size` ranks that are threads of this process."""
    return [MessageChannel(rank, row) for rank, row in enumerate(local_descriptors(size))]


_open: weakref.WeakSet[MessageChannel] = weakref.WeakSet()


def _close_all() -> None:
    # A channel's thread must end before the interpreter does: it may let go of a tensor that Python knows.
    for channel in list(_open):
        channel.close()


atexit.register(_close_all)
