"""Ranks that are threads of this process."""

from __future__ import annotations

import ast
import functools
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# CPython 3.11 counts the depth of all syntax trees under construction in one place. When a collection of
# garbage lets another thread build one meanwhile, the first one ends with "SystemError: AST constructor
# recursion depth mismatch". Numpy (headers of files) and torch (scripting) build trees on every rank.
_one_tree = threading.Lock()
_parse = ast.parse


@functools.wraps(_parse)
def _parse_alone(*args: Any, **options: Any) -> Any:
    with _one_tree:
        return _parse(*args, **options)


ast.parse = _parse_alone


def run_threads(
    size: int, work: Callable[[int], T], timeout: float, failed: Callable[[], None] = lambda: None
) -> list[T]:
    """The results of ``work(rank)`` on a thread for each rank, or the first rank's exception.

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
        error = errors[0][1]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note("".join(f"\n--- rank {rank}\n{trace}" for rank, _, trace in errors))
        raise error
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return [results[rank] for rank in range(size)]
