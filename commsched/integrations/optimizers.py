"""Arguments for ``DistributedOptimizer``, and accumulation of gradients by the optimizers it has made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commsched.integrations.replica import Replica
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.wrapper import DistributedMethods

# The trainers give these themselves: they know the model and count the accumulated batches.
_DECIDED = {"optimizer", "named_parameters", "model", "backward_passes_per_step"}


def split_options(
    taker: str,
    given: Mapping[str, Any],
    without: AbstractSet[str] = frozenset(),
    others: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``DistributedOptimizer``, and those named in ``others``.

    ``taker`` is the subject of the error about any other argument and about those in ``without``.
    """
    parameters = inspect.signature(DistributedOptimizer).parameters
    options = [name for name in parameters if name not in _DECIDED | without]
    unknown = sorted(set(given) - {*options, *others})
    if unknown:
        more = f" and the library's {', '.join(others)}" if others else ""
        hint = ""
        if "find_unused_parameters" in unknown:
            hint = "; leave find_unused_parameters out, because unused parameters are always allowed"
        raise ValueError(
            f"{taker} takes arguments of DistributedOptimizer ({', '.join(options)}){more}, but got"
            f" {', '.join(unknown)}{hint}"
        )
    chosen = {name: value for name, value in given.items() if name in options}
    return chosen, {name: value for name, value in given.items() if name in others}


def has_parameters_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether the optimizer updates a parameter of the model."""
    owned = {id(param) for param in model.parameters()}
    return any(id(param) in owned for group in optimizer.param_groups for param in group["params"])


@contextmanager
def accumulating(model: nn.Module, optimizers: Iterable[Any], replica: Replica | None) -> Iterator[None]:
    """Accumulate the gradients of the model's parameters on each rank, as in DDP's ``no_sync``.

    ``replica`` is the model's, if there is one.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedMethods) and has_parameters_of(model, optimizer):
                stack.enter_context(optimizer.no_sync())
        if replica is not None:
            stack.enter_context(replica.pause())
        yield
