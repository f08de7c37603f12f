"""``FabricStrategy``: what ``Strategy`` does for ``Trainer``, for training loops over ``Fabric``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commsched.integrations import Replica, accumulating, reduce_before_step
from commsched.lightning.job import LightningJob, strategy_options
from commsched.lightning.job import fabric as lightning

DDPStrategy: Any = lightning("strategies").DDPStrategy
BackwardSyncControl: Any = lightning("strategies.strategy")._BackwardSyncControl


class FabricStrategy(DDPStrategy):
    """Data parallelism with scheduled communication; the module stays itself, without DDP's wrapper.

    Takes the same options as ``Strategy``.
    """

    strategy_name = "commsched"

    def __init__(self, *, broadcast_buffers: bool = True, **options: Any) -> None:
        options, of_lightning = strategy_options(options)
        super().__init__(**of_lightning)
        self._job = LightningJob(options)
        self._broadcast_buffers = broadcast_buffers
        self._backward_sync_control = _Accumulation(self)
        self._optimizers: list[Optimizer] = []
        self._replicas: dict[nn.Module, Replica] = {}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._job.join(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Give every rank rank 0's parameters and buffers."""
        unclaimed = self._job.unclaimed(module, lambda: self._optimizers)
        replica = Replica(module, self._broadcast_buffers, hold_statistics=True, unclaimed=unclaimed)
        replica.attach()
        self._replicas[module] = replica
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        wrapped = self._job.wrap(optimizer)
        self._optimizers.append(wrapped)
        return wrapped

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if getattr(self.precision, "scaler", None) is not None:
            reduce_before_step([optimizer])
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        if getattr(optimizer, "_shards", None) is None:
            reduce_before_step([optimizer])
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        if getattr(self.precision, "scaler", None) is not None:
            optimizer.synchronize()
            self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        reduce_before_step([optimizer])
        super().clip_gradients_value(module, optimizer, clip_val)

    def teardown(self) -> None:
        self._job.release(self._optimizers, wait=True)
        for replica in self._replicas.values():
            replica.close()
        self._replicas.clear()
        super().teardown()
        self._job.leave()

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within this context the gradients of the module's parameters are not reduced."""
        return accumulating(module, self._optimizers, self._replicas.get(module))


class _Accumulation(BackwardSyncControl):
    """Lightning calls it for ``fabric.no_backward_sync(module)``."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.accumulating(module) if enabled else nullcontext()


lightning("strategies").STRATEGY_REGISTRY.register(
    FabricStrategy.strategy_name,
    FabricStrategy,
    description="Communication scheduled by commsched, without DDP's wrapper",
)
