"""What both strategies hold: the options of the optimizers, and commsched's part in Lightning's job."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commsched.collectives.initialization import is_initialized, join_framework, shutdown, size
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.wrapper import DistributedMethods
from commsched.process.launch import Launch

# Lightning accumulates gradients and chooses the ranks itself, and the strategy knows the model.
_NOT_OPTIONS = {"optimizer", "named_parameters", "backward_passes_per_step", "groups", "process_set", "model"}
_OPTIONS = [name for name in inspect.signature(DistributedOptimizer).parameters if name not in _NOT_OPTIONS]
_OF_LIGHTNING = (
    "accelerator parallel_devices cluster_environment checkpoint_io precision precision_plugin"
    " process_group_backend timeout start_method"
).split()


def split_options(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of ``DistributedOptimizer``, and the arguments for Lightning's own strategy."""
    unknown = sorted(set(arguments) - {*_OPTIONS, *_OF_LIGHTNING})
    if unknown:
        hint = ""
        if "find_unused_parameters" in unknown:
            hint = "; leave find_unused_parameters out, because unused parameters are always allowed"
        raise TypeError(
            f"the strategy has no option {', '.join(unknown)}; it takes {', '.join(_OPTIONS)} and Lightning's"
            f" {', '.join(_OF_LIGHTNING)}{hint}"
        )
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    return options, {name: value for name, value in arguments.items() if name not in options}


class Session:
    """Joins Lightning's ranks to commsched's job, and wraps and releases the optimizers."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._joined = False

    @property
    def shards(self) -> bool:
        """Whether each rank holds a part of the gradients and of the optimizer's state only."""
        return self._options.get("gather") == "parameters"

    def join(self, strategy: Any) -> None:
        """Start commsched's collectives over the ranks that Lightning has started and connected."""
        if is_initialized():
            if size() != strategy.world_size:
                raise ValueError(
                    f"commsched.init() has joined a job of {size()} ranks, but the strategy has"
                    f" {strategy.world_size}; leave commsched.init() out, because the strategy calls it"
                )
            return
        launch = Launch(
            "lightning",
            strategy.global_rank,
            strategy.world_size,
            strategy.local_rank,
            strategy.num_processes,
            str(strategy.node_rank),
        )
        join_framework(launch, lambda value: strategy.broadcast(value, src=0))
        self._joined = True

    def leave(self) -> None:
        """End the collectives, if ``join`` started them."""
        if self._joined:
            self._joined = False
            shutdown()

    def wrap(self, optimizer: Any, model: nn.Module | None = None) -> Optimizer:
        """Return the optimizer distributed, unless it is already or has none of the model's parameters."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"the strategy distributes optimizers derived from torch.optim.Optimizer, got a"
                f" {type(optimizer).__name__}"
            )
        if isinstance(optimizer, DistributedMethods):
            return optimizer
        named = None
        if model is not None:
            named = list(model.named_parameters())
            known = {id(param) for _, param in named}
            # Lightning makes an optimizer over nothing where configure_optimizers() returns None.
            if not any(id(param) in known for group in optimizer.param_groups for param in group["params"]):
                return optimizer
        return DistributedOptimizer(optimizer, named, model=model, **self._options)

    def release(self, optimizers: Sequence[Any], wait: bool) -> None:
        """Make the optimizers ordinary ones again; after an error, without waiting for the other ranks."""
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedMethods):
                optimizer.release(wait)


@contextmanager
def without_reduction(optimizers: Sequence[Any]) -> Iterator[None]:
    """Accumulate gradients on each rank, as in ``DistributedDataParallel.no_sync``."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedMethods):
                stack.enter_context(optimizer.no_sync())
        yield
