"""Gives all ranks rank 0's parameters and buffers when ``DistributedDataParallel`` would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.modules.batchnorm import _NormBase

_BYTES_AT_ONCE = 250 * 2**20


def broadcast_module(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks; the default group's error if shapes differ."""
    params = [param.detach() for param in module.parameters()]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if params:
        _verify_param_shape_across_processes(_world(), params)
    _broadcast([*params, *module.buffers()])


def _broadcast(tensors: list[torch.Tensor]) -> None:
    if tensors:
        dist._broadcast_coalesced(_world(), tensors, _BYTES_AT_ONCE, 0)


def _world() -> Any:
    return dist.group.WORLD


class BufferBroadcast:
    """Copies rank 0's buffers to all ranks before a forward that follows a training forward.

    The running statistics of batch normalisation wait for the first forward in evaluation mode: a forward in
    training mode only updates them, so that what rank 0 stores and every rank computes is the same.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._others_due = self._statistics_due = self._paused = False

    def before_forward(self) -> None:
        if self._alone or not (self._others_due or self._statistics_due):
            return
        due: list[torch.Tensor] = []
        waiting = False
        for module in self._module.modules():
            buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
            if not isinstance(module, _NormBase):
                due += buffers if self._others_due else []
            elif module.training:
                waiting = waiting or bool(buffers)
            elif self._statistics_due:
                due += buffers
        _broadcast(due)
        self._statistics_due = waiting

    def after_forward(self) -> None:
        self._others_due = torch.is_grad_enabled() and not self._paused
        self._statistics_due = self._statistics_due or torch.is_grad_enabled()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """As after a forward within ``DistributedDataParallel.no_sync``."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
