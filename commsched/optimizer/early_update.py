"""``early_step``: each shard is updated as soon as its bucket is reduced, inside the backward.

The backward's thread cannot wait for that. Another thread waits for the buckets in the order of the plan,
updates this rank's shards and starts the parameters' all-gathers. It holds the GIL only while it updates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_CLOSING_SECONDS = 5.0


class EarlyUpdates:
    """Runs ``update(bucket)`` for every bucket of a round, on a thread of its own."""

    def __init__(self, update: Callable[[int], None], buckets: Sequence[int]) -> None:
        self._update = update
        self._buckets = list(buckets)
        self._begun = threading.Semaphore(0)
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="commsched-early-step", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start the updates of a round."""
        self._idle.clear()
        self._begun.release()

    def finish(self) -> None:
        """Wait for the round's updates, each of which has a time-out; raise the first error in them."""
        self._idle.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread. Its waits must be over or about to fail."""
        self._ended = True
        self._begun.release()
        # A thread that returns from C++ while the interpreter shuts down aborts the process.
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        while True:
            self._begun.acquire()
            if self._ended:
                return
            try:
                for bucket in self._buckets:
                    self._update(bucket)
            except BaseException as error:
                self._error = error
            self._idle.set()
