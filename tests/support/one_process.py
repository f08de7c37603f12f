"""What ranks that are threads of one process must not do at the same time.

They make models within ``seed()`` (or ``ONE_MODEL``), because they share torch's generator. For the rest
importing this is enough: the collector of garbage runs wherever an object is made, and may let another thread
run. Three things do not bear that:

- CPython 3.11 counts the depth of all syntax trees under construction in one place. With a tree that another
  thread builds meanwhile, the first ends with "SystemError: AST constructor recursion depth mismatch". Numpy
  (headers of files) and torch (scripting) build trees on every rank.
- Under a ``TorchDispatchMode``, an operation's first use makes its object ``torch.ops.aten.add.Tensor``. C++
  keeps its address, without a reference. Two threads make two objects: the second replaces the first in its
  module, and later calls crash. ``resolve_operations()`` makes all of them.
- A generator's ``get_state`` makes a tensor while it holds the generator's lock. A thread that then wants it
  waits without giving Python's own lock back, so the first never goes on: nothing in the process does.
"""

from __future__ import annotations

import ast
import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ONE_MODEL = threading.RLock()
_one_tree = threading.Lock()
_one_state = threading.Lock()
_parse = ast.parse
_get_rng_state = torch.random.get_rng_state


@contextmanager
def seed(number: int) -> Iterator[None]:
    """Draw as after ``torch.manual_seed()``, whatever other ranks make meanwhile."""
    with ONE_MODEL:
        torch.manual_seed(number)
        yield


@functools.cache
def resolve_operations() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        operation, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and hasattr(torch.ops.aten, operation):
            getattr(getattr(torch.ops.aten, operation), overload or "default", None)


@functools.wraps(_parse)
def _parse_alone(*args: Any, **options: Any) -> Any:
    with _one_tree:
        return _parse(*args, **options)


@functools.wraps(_get_rng_state)
def _get_rng_state_uncollected() -> torch.Tensor:
    with _one_state:  # so that no other thread turns the collector on again
        collects = gc.isenabled()
        gc.disable()
        try:
            return _get_rng_state()
        finally:
            if collects:
                gc.enable()


ast.parse = _parse_alone
torch.get_rng_state = torch.random.get_rng_state = _get_rng_state_uncollected
