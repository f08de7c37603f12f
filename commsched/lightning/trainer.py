"""``Strategy``: trains a LightningModule with ``DistributedOptimizer`` instead of DDP's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from commsched.collectives.sync_batch_norm import SyncBatchNorm
from commsched.integrations import Replica, accumulating, reduce_before_step
from commsched.lightning.job import LightningJob, strategy_options
from commsched.lightning.job import trainer as lightning

DDPStrategy: Any = lightning("strategies").DDPStrategy
TorchSyncBatchNorm: Any = lightning("plugins.layer_sync").TorchSyncBatchNorm
is_overridden: Any = lightning("utilities.model_helpers").is_overridden


class Strategy(DDPStrategy):
    """Data parallelism with scheduled communication; the module stays itself, without a wrapper.

    Takes the options of ``DistributedOptimizer`` (``gather="parameters"``, ``schedule="dear"``, ...) and the
    arguments of Lightning's ``DDPStrategy`` that do not concern the DDP wrapper.
    ``broadcast_buffers=False`` leaves each rank its own buffers.
    """

    strategy_name = "commsched"
    _layer_sync: Any
    optimizers: Any

    def __init__(self, *, broadcast_buffers: bool = True, **options: Any) -> None:
        options, of_lightning = strategy_options(options)
        super().__init__(**of_lightning)
        self._job = LightningJob(options)
        self._broadcast_buffers = broadcast_buffers
        self._replica: Replica | None = None
        self._failed = False

    # -- beginning and end -----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        self._failed = False
        self._job.join(self)

    def setup(self, trainer: Any) -> None:
        if isinstance(self._layer_sync, TorchSyncBatchNorm) and self.root_device.type == "cpu":
            self._layer_sync = CpuSyncBatchNorm()
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Give every rank rank 0's model; called where ``DDPStrategy`` would wrap it."""
        unclaimed = self._job.unclaimed(self.model, lambda: self.optimizers)
        self._replica = Replica(
            self.model, self._broadcast_buffers, hold_statistics=True, unclaimed=unclaimed
        )

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self.optimizers = [self._job.wrap(one, self.lightning_module) for one in self.optimizers]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = self._clip_by_value

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        self._job.release(self.optimizers, wait=not self._failed)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self.precision_plugin.__dict__.pop(name, None)
        if self._replica is not None:
            self._replica.close(wait=not self._failed)
            self._replica = None
        super().teardown()
        self._job.leave()

    # -- a step ----------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward()
        return super().validation_step(*args, **kwargs)

    def _before_forward(self) -> None:
        if self._replica is not None:  # validation without training has none
            self._replica.before_forward()

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank."""
        return accumulating(self.lightning_module, self.optimizers, self._replica)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure and update; hooks between both see the reduced gradients."""
        if not self._hooks_read_gradients():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def reduced() -> Any:
            result = closure()
            reduce_before_step([optimizer])
            return result

        return super().optimizer_step(optimizer, reduced, model, **kwargs)

    def _hooks_read_gradients(self) -> bool:
        """Return whether a scaler or a hook between backward and update may read the gradients."""
        module = self.lightning_module
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
        return (
            getattr(self.precision_plugin, "scaler", None) is not None
            or any(is_overridden(name, module) for name in hooks)
            or any(is_overridden("on_before_optimizer_step", one) for one in module.trainer.callbacks)
        )

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if getattr(optimizer, "_shards", None) is not None:
            optimizer.clip_grad_norm_(clip_val)
            return
        reduce_before_step([optimizer])
        type(self.precision_plugin).clip_grad_by_norm(self.precision_plugin, optimizer, clip_val)

    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        reduce_before_step([optimizer])
        type(self.precision_plugin).clip_grad_by_value(self.precision_plugin, optimizer, clip_val)


_DESCRIPTION = "Communication scheduled by commsched, without DDP's wrapper"
lightning("strategies").StrategyRegistry.register(Strategy.strategy_name, Strategy, description=_DESCRIPTION)


# -- sync_batchnorm=True on CPUs, where torch's ``SyncBatchNorm`` refuses to run -----------------------------

LayerSync: Any = lightning("plugins.layer_sync").LayerSync
_SHARED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class CpuSyncBatchNorm(LayerSync):
    """Replaces batch normalisation by ``commsched.SyncBatchNorm``, and back."""

    def __init__(self) -> None:
        self._originals: dict[SyncBatchNorm, _BatchNorm] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        return self._replace(model, self._synchronised)

    def revert(self, model: nn.Module) -> nn.Module:
        reverted = self._replace(model, self._original)
        self._originals.clear()
        return reverted

    def _replace(self, module: nn.Module, other: Any) -> nn.Module:
        replaced = other(module)
        if replaced is not module:
            for name in _SHARED:
                setattr(replaced, name, getattr(module, name))
            replaced.train(module.training)
            return replaced
        for name, child in list(module.named_children()):
            setattr(module, name, self._replace(child, other))
        return module

    def _synchronised(self, module: nn.Module) -> nn.Module:
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            return module
        arguments = (module.num_features, module.eps, module.momentum)
        made = SyncBatchNorm(*arguments, module.affine, module.track_running_stats)
        self._originals[made] = module
        return made

    def _original(self, module: nn.Module) -> nn.Module:
        return self._originals.get(module, module) if isinstance(module, SyncBatchNorm) else module
