"""Batch normalisation whose statistics cover the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from commsched.collectives.job import ProcessSet, global_process_set
from commsched.collectives.operations import Sum, allgather_async, allreduce_async, synchronize
from commsched.collectives.torch_carrier.carrier import has_memory


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm*d`` over the batches of all ranks of `process_set` as if they were one batch.

    Takes inputs of shape (N, C, ...) on CPUs and GPUs; N may differ from rank to rank. In evaluation mode,
    and with one rank, it is plain batch normalisation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm needs an input of at least 2 dimensions (N, C, ...), but got {input.dim()}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        # As in torch, the statistics may be there and not be tracked for the moment.
        tracks = self.training and self.track_running_stats
        uses_batch = self.training or self.running_mean is None
        factor = 0.0 if self.momentum is None else self.momentum
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        used = not self.training or self.track_running_stats
        tracked = (self.running_mean, self.running_var) if used else (None, None)
        if not self.training or self.process_set.size() == 1:
            return F.batch_norm(input, *tracked, self.weight, self.bias, uses_batch, factor, self.eps)
        if not has_memory(input):
            raise ValueError(
                f"SyncBatchNorm needs a tensor with memory of its own, but got a {type(input).__name__} on "
                f"{input.device}; for tiles use torch.nn.BatchNorm2d, whose statistics are of the whole image"
            )
        normalised, mean, var, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if tracks and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = var * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return normalised


def _local_statistics(x: torch.Tensor) -> torch.Tensor:
    """Return one row: the count, then per channel the mean, then the sum of squared deviations from it."""
    count = x.shape[0] * x.shape[2]
    if count == 0:
        return x.new_zeros(1, 1 + 2 * x.shape[1])
    mean = x.mean(dim=(0, 2))
    squares = (x - mean.view(1, -1, 1)).square().sum(dim=(0, 2))
    return torch.cat([x.new_tensor([count]), mean, squares]).unsqueeze(0)


class _Normalise(Function):
    """The forward exchanges every rank's statistics, the backward two sums for the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, ...]:
        x = _channels(input)
        rows = synchronize(allgather_async(_local_statistics(x), process_set=process_set))
        counts, means, squares = rows.split([1, x.shape[1], x.shape[1]], dim=1)
        total = counts.sum().clamp(min=1)
        mean = (counts * means).sum(dim=0) / total
        # Squared deviations are added around each rank's own mean and then shifted: no cancellation.
        var = (squares + counts * (means - mean).square()).sum(dim=0) / total
        scale = torch.rsqrt(var + eps)
        centred = (x - mean.view(1, -1, 1)) * scale.view(1, -1, 1)
        ctx.save_for_backward(centred, weight, scale, total)
        ctx.process_set, ctx.dtype = process_set, input.dtype
        result = centred if weight is None else centred * weight.view(1, -1, 1)
        if bias is not None:
            result = result + bias.view(1, -1, 1)
        ctx.mark_non_differentiable(mean, var, total)
        return result.view(input.shape).to(input.dtype), mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        centred, weight, scale, total = ctx.saved_tensors
        gradient = _channels(gradients[0])
        sums = torch.stack([gradient.sum(dim=(0, 2)), (gradient * centred).sum(dim=(0, 2))])
        # weight and bias get this rank's part, as in any layer: the optimizer combines them.
        to_bias, to_weight = sums.to(ctx.dtype if weight is None else weight.dtype).unbind()
        everywhere = synchronize(allreduce_async(sums, op=Sum, process_set=ctx.process_set)) / total
        factor = scale if weight is None else scale * weight
        back = (
            gradient - everywhere[0].view(1, -1, 1) - centred * everywhere[1].view(1, -1, 1)
        ) * factor.view(1, -1, 1)
        needs = ctx.needs_input_grad
        return (
            back.view(gradients[0].shape).to(ctx.dtype) if needs[0] else None,
            to_weight if needs[1] else None,
            to_bias if needs[2] else None,
            None,
            None,
        )


def _channels(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as (N, C, everything else), in single precision at least."""
    batch, channels = tensor.shape[:2]
    flat = tensor.reshape(batch, channels, -1) if tensor.numel() else tensor.reshape(0, channels, 1)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
