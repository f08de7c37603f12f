"""``Trainer(sync_batchnorm=True)`` on CPUs, where torch's ``SyncBatchNorm`` refuses to run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from commsched.collectives.sync_batch_norm import SyncBatchNorm
from commsched.lightning.packages import trainer

LayerSync: Any = trainer("plugins.layer_sync").LayerSync
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
