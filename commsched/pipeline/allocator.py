"""Keeps freed memory in the process.

A pipeline allocates and frees the same activations for every micro-batch. glibc gives memory at the heap's
end back to the system as soon as some megabytes of it are free, and gets it again page by page, as it does
with every large block: thousands of page faults a step, which cost more than all of the pipeline's own work.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
_NEVER, _NONE = -1, 0  # give nothing back; map no block by itself, which is gone when it is freed
_THEIRS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> bool:
    """Whether the process keeps what it frees from now on: not without glibc, nor where the user's own
    variables say something else.
    """
    if any(name in os.environ for name in _THEIRS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_MAX, _NONE))
