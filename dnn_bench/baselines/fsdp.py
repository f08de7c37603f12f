"""PyTorch's fully_shard (FSDP2), block by block as its documentation advises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dnn_bench.baselines.job import Job
from dnn_bench.baselines.trainer import Trainer

LEAST_SHARE = 0.01  # of the model's parameters; smaller parts go with the root


class FSDP2(Trainer):
    def __init__(self, job: Job, reshard_after_forward: bool = True) -> None:
        self.reshard_after_forward = reshard_after_forward
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        mesh = init_device_mesh(self.job.device.partition(":")[0], (self.size,))
        for module in [*blocks(model), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        return model, self.job.build_optimizer(model.parameters())

    def parameters(self) -> dict[str, Tensor]:
        self.finish()
        whole = {}
        for name, value in self.module.named_parameters():
            data = value.detach()
            whole[name] = data.full_tensor() if isinstance(data, DTensor) else data.clone()
        return whole


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of the top-level sequences (or of the model itself) that are worth a message."""
    least = LEAST_SHARE * parameter_count(model)
    trunks = [model] if isinstance(model, nn.Sequential) else list(model.children())
    for trunk in trunks:
        if isinstance(trunk, nn.Sequential):
            yield from (child for child in trunk if parameter_count(child) >= least)


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
