"""Start a collective, poll and wait for it; ``join`` and ``barrier``, which have no handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch

from commsched.collectives.carrier import Collective
from commsched.collectives.current_carrier import carrier
from commsched.collectives.process_sets import ProcessSet, global_process_set, registered_id


def start(
    kind: str, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, **arguments: Any
) -> int:
    """Start a collective; `arguments` are ``Collective``'s other fields."""
    return carrier().start(Collective(kind, list(tensors), name, registered_id(process_set), **arguments))


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended, so that ``synchronize`` will not wait."""
    return carrier().poll(handle)


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its result; ``CommError`` if it failed.

    Accepts the result of ``sparse_allreduce_async`` too.
    """
    return handle() if callable(handle) else carrier().synchronize(handle)


Arguments = ParamSpec("Arguments")


def waiting(start_it: Callable[Arguments, int], what: str) -> Callable[Arguments, Any]:
    """Return a function that starts an operation and waits for it; ``what`` is its description."""

    @wraps(start_it)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Any:
        return synchronize(start_it(*arguments, **options))

    run.__name__ = run.__qualname__ = start_it.__name__.replace("_async", "")
    run.__doc__ = what
    return run


def join(device: int = -1) -> int:
    """Tell the other ranks that this one has no more data, and wait until every rank has joined.

    Until then this rank contributes zeros to the others' all-reduces, on GPU `device` (-1: the CPU). Returns
    the rank that joined last.
    """
    return carrier().join(device)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    carrier().barrier(registered_id(process_set))
