"""What happens to freed memory: while a model is made it goes back to the system, in training it stays.

A pipeline allocates and frees the same activations for every micro-batch. glibc gives memory at the heap's
end back to the system as soon as some megabytes of it are free, and gets it again page by page, as it does
with every large block: thousands of page faults a step, which cost more than all of the pipeline's own work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER, _NONE = -1, 0  # give nothing back; map no block by itself, which is gone when it is freed
_LARGE, _MANY = 1 << 18, 1 << 16  # map blocks from this size on by themselves; this many is glibc's default
_THEIRS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Whether the process keeps what it frees from now on: not without glibc, nor where the user's own
    variables say something else.
    """
    return _set(_TRIM_THRESHOLD, _NEVER) and _set(_MMAP_MAX, _NONE)


@contextmanager
def giving_back_large_blocks() -> Iterator[None]:
    """Meanwhile large blocks are mapped by themselves. In the heap, parameters that are kept would lie
    between freed ones, whose memory would stay.
    """
    keeps = keep_freed_memory.cache_info().currsize > 0
    _set(_MMAP_THRESHOLD, _LARGE)
    _set(_MMAP_MAX, _MANY)
    try:
        yield
    finally:
        if keeps:
            _set(_MMAP_MAX, _NONE)


def _set(option: int, value: int) -> bool:
    if any(name in os.environ for name in _THEIRS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))
