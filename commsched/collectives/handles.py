"""Start a collective, poll and wait for it; ``barrier``, which has no handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Signature, signature
from typing import Any, ParamSpec

import torch

from commsched.collectives.carrier import Collective
from commsched.collectives.current_carrier import carrier
from commsched.collectives.process_sets import ProcessSet, global_process_set, registered_id


def start(
    kind: str,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    **arguments: Any,
) -> int:
    """Start a collective of one tensor, or of a list of tensors as one operation; `arguments` are
    ``Collective``'s other fields.
    """
    single = isinstance(tensors, torch.Tensor)
    each = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    set_id = registered_id(process_set)
    return carrier().start(Collective(kind, each, name, set_id, grouped=not single, **arguments))


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


def grouped(single: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function that does with several tensors, as one operation, what ``single`` does with one."""

    @wraps(single)
    def run(tensors: Sequence[torch.Tensor], *arguments: Any, **options: Any) -> Any:
        return single(tensors, *arguments, **options)

    first, *others = signature(single).parameters.values()
    run.__signature__ = Signature([first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    run.__name__ = run.__qualname__ = f"grouped_{single.__name__}"
    run.__doc__ = what
    return run


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    carrier().barrier(registered_id(process_set))
