"""Messages in flight over a c10d group: waited for, watched by a thread, or aborted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from comm_core import Traffic, abort_message, link_gate
from commsched.errors import CommError

# Less urgent messages wait this many seconds for a halo, and longer by its bytes at this speed (bytes per
# second). A halo that takes longer waits for its receiver, and not for the link.
PATIENCE, _SLOWEST_LINK = 0.1, 10e6


def begin_turn(traffic: Traffic | None, size: int) -> Callable[[], None]:
    """Wait until no more urgent message is on the link, and return the function that ends this one's turn.

    Less urgent messages do not start during a turn. Without `traffic` there is none.
    """
    if traffic is None:
        return lambda: None
    return partial(link_gate().end, link_gate().begin(traffic, size, PATIENCE + size / _SLOWEST_LINK))


class GroupMessages:
    """The sends and receives of one exchange. `works` holds each message's peer and c10d work.

    The object keeps `buffers` alive until the messages have left and arrived.
    """

    def __init__(
        self,
        works: Sequence[tuple[int, Any]],
        buffers: Sequence[Tensor],
        end_turn: Callable[[], None],
        operation: str,
        rank: int,
        timeout: float,
    ) -> None:
        self._works, self._buffers, self._end_turn = works, buffers, end_turn
        self._operation, self._rank, self._timeout = operation, rank, timeout
        self._deadline = time.monotonic() + timeout
        self._abort_reason = ""
        self._watched: threading.Event | None = None
        self._error: CommError | None = None

    def abort(self, reason: str) -> None:
        """End every wait, now and later, with an error that contains `reason`."""
        self._abort_reason = reason
        for _, work in list(self._works):
            abort_message(work)

    def watch(self) -> None:
        """Wait in the watcher thread, so that the turn ends when the messages arrive and not at `wait()`."""
        self._watched = threading.Event()
        _watcher().put(self)

    def finish_watched(self) -> None:
        """Wait for the messages in the watcher thread: c10d allows only one thread to wait for a message."""
        assert self._watched is not None
        try:
            self._wait_all()
        except CommError as error:
            self._error = error
        self._watched.set()

    def wait(self) -> None:
        if self._watched is None:
            self._wait_all()
        else:
            self._watched.wait()
        if self._error is not None:
            raise self._error

    def _wait_all(self) -> None:
        try:
            for peer, work in self._works:
                self._wait_one(peer, work)
        finally:
            self._end_turn()
            self._works, self._buffers = (), ()

    def _wait_one(self, peer: int, work: Any) -> None:
        remaining = timedelta(seconds=max(0.001, self._deadline - time.monotonic()))
        try:
            arrived = not self._abort_reason and work.wait(remaining)
        except RuntimeError as error:
            raise CommError(
                f"{self._operation}: rank {self._rank} heard nothing of rank {peer} within"
                f" {self._timeout:g} s; look for the first error on rank {peer} ({error})"
            ) from error
        if not arrived:
            raise CommError(
                f"{self._operation}: rank {self._rank} waited for rank {peer}, but {self._abort_reason}"
            )


@lru_cache(maxsize=1)
def _watcher() -> queue.SimpleQueue[GroupMessages]:
    """Return the queue of the watcher thread, which waits for its entries one after the other."""
    waiting: queue.SimpleQueue[GroupMessages] = queue.SimpleQueue()

    def run() -> None:
        while True:
            waiting.get().finish_watched()

    threading.Thread(target=run, name="commsched halos", daemon=True).start()
    return waiting
