"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import tests.support.one_process  # noqa: F401
from commsched.errors import CommError

T = TypeVar("T")


def run_threads(
    size: int, work: Callable[[int], T], timeout: float, failed: Callable[[], None] = lambda: None
) -> list[T]:
    """The results of ``work(rank)`` on a thread for each rank, or the first exception; a ``CommError`` comes
    last, for a rank whose peer has failed may be the first to say so.

    ``failed`` is called when a rank raises, so that the others need not wait for it.
    """
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException, str]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append((rank, error, traceback.format_exc()))
            failed()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        error = min(errors, key=lambda each: isinstance(each[1], CommError))[1]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note("".join(f"\n--- rank {rank}\n{trace}" for rank, _, trace in errors))
        raise error
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return [results[rank] for rank in range(size)]
