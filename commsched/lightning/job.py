"""``LightningJob``, which both strategies hold: options of the optimizers, and commsched in the job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commsched.collectives.job import is_initialized, join_framework, shutdown, size
from commsched.integrations import UnclaimedGradients, has_parameters_of, split_options
from commsched.optimizer.distributed import DistributedOptimizer
from commsched.optimizer.wrapper import DistributedMethods
from commsched.process.launch import Launch

_OF_LIGHTNING = (
    "accelerator parallel_devices cluster_environment checkpoint_io precision precision_plugin"
    " process_group_backend timeout start_method"
).split()


def strategy_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of ``DistributedOptimizer``, and the arguments for Lightning's own strategy."""
    # Lightning chooses the ranks. Groups hold parameters of a model that is made later.
    return split_options("the strategy", given, {"groups", "process_set"}, _OF_LIGHTNING)


class LightningJob:
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
        # Lightning makes an optimizer over nothing where configure_optimizers() returns None.
        if model is not None and not has_parameters_of(model, optimizer):
            return optimizer
        return DistributedOptimizer(optimizer, model=model, **self._options)

    def unclaimed(self, model: nn.Module, optimizers: Callable[[], Iterable[Any]]) -> UnclaimedGradients:
        """Return an object that averages the gradients that no distributed one of these optimizers does."""
        return UnclaimedGradients(model, optimizers, self._options)

    def release(self, optimizers: Sequence[Any], wait: bool) -> None:
        """Make the optimizers ordinary ones again; after an error, without waiting for the other ranks."""
        for optimizer in optimizers:
            if isinstance(optimizer, DistributedMethods):
                optimizer.release(wait)


# -- finds Lightning: the package ``lightning``, or ``pytorch_lightning`` with ``lightning_fabric`` ----------


def _names() -> tuple[str, str]:
    """Return the names of the packages with Trainer and Fabric; of two installed ones, the imported one."""
    one, two = ("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")
    imported = [names for names in (one, two) if names[0] in sys.modules]
    installed = [names for names in (one, two) if all(find_spec(name.split(".")[0]) for name in names)]
    for names in (*imported, *installed):
        return names
    raise ModuleNotFoundError(
        "commsched.lightning needs Lightning, which is not installed: pip install 'commsched[lightning]'"
    )


_trainer, _fabric = _names()


def trainer(module: str) -> Any:
    """Import a module of the package that holds ``Trainer``."""
    return import_module(f"{_trainer}.{module}")


def fabric(module: str) -> Any:
    """Import a module of the package that holds ``Fabric``."""
    return import_module(f"{_fabric}.{module}")
