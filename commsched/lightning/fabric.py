"""``FabricStrategy``: the same for training loops over ``Fabric``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from commsched.lightning.module_state import BufferBroadcast, broadcast_module
from commsched.lightning.packages import fabric as lightning
from commsched.lightning.session import Session, split_options, without_reduction

DDPStrategy: Any = lightning("strategies").DDPStrategy
BackwardSyncControl: Any = lightning("strategies.strategy")._BackwardSyncControl


class FabricStrategy(DDPStrategy):
    """Data parallelism with scheduled communication; the module stays itself, without DDP's wrapper.

    Takes the same options as ``Strategy``.
    """

    strategy_name = "commsched"

    def __init__(self, *, broadcast_buffers: bool = True, **options: Any) -> None:
        options, of_lightning = split_options(options)
        super().__init__(**of_lightning)
        self._session = Session(options)
        self._broadcast_buffers = broadcast_buffers
        self._backward_sync_control = _Accumulation(self)
        self._optimizers: list[Optimizer] = []
        self._buffers: dict[nn.Module, BufferBroadcast] = {}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._session.join(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Give every rank rank 0's parameters and buffers."""
        broadcast_module(module)
        if self._broadcast_buffers:
            self._buffers[module] = buffers = BufferBroadcast(module)
            module.register_forward_pre_hook(lambda *_: buffers.before_forward())
            module.register_forward_hook(lambda *_: buffers.after_forward())
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        wrapped = self._session.wrap(optimizer)
        self._optimizers.append(wrapped)
        return wrapped

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self._session.shards and getattr(self.precision, "scaler", None) is not None:
            optimizer.synchronize()
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        if not self._session.shards:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self._unscale(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        if self._session.shards:
            optimizer.synchronize()
        super().clip_gradients_value(module, optimizer, clip_val)

    def _unscale(self, optimizer: Any) -> None:
        if getattr(self.precision, "scaler", None) is not None:
            optimizer.synchronize()
            self.precision.unscale_gradients(optimizer)

    def teardown(self) -> None:
        self._session.release(self._optimizers, wait=True)
        super().teardown()
        self._session.leave()

    @contextmanager
    def accumulating(self, module: nn.Module) -> Iterator[None]:
        """Within this context the gradients of the module's parameters are not reduced."""
        owned = {id(param) for param in module.parameters()}
        mine = [
            one
            for one in self._optimizers
            if any(id(param) in owned for group in one.param_groups for param in group["params"])
        ]
        with ExitStack() as stack:
            stack.enter_context(without_reduction(mine))
            if module in self._buffers:
                stack.enter_context(self._buffers[module].pause())
            yield


class _Accumulation(BackwardSyncControl):
    """What ``fabric.no_backward_sync(module)`` calls."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if enabled:
                stack.enter_context(self._strategy.accumulating(module))
            yield


lightning("strategies").STRATEGY_REGISTRY.register(
    FabricStrategy.strategy_name,
    FabricStrategy,
    description="Communication scheduled by commsched, without DDP's wrapper",
)
