"""Keeps the copies of a model equal as DDP does: all of it at first, then the buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from commsched.collectives.data_movement import broadcast_
from commsched.collectives.model_state import broadcast_parameters


class Replica:
    """One rank's copy of a model that all ranks train."""

    def __init__(self, model: nn.Module, broadcast_buffers: bool, in_evaluation: bool) -> None:
        """Overwrite parameters and buffers with rank 0's.

        With ``broadcast_buffers`` rank 0's buffers are also sent before each forward that follows a
        synchronizing one, if they have changed. ``in_evaluation``: before forwards without gradients too.
        """
        self.model = model
        self.paused = False  # within no_sync()
        self._in_evaluation = in_evaluation
        self._ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self._due = True
        named = [*model.named_parameters(), *model.named_buffers()]
        broadcast_parameters([tensor for name, tensor in named if name not in self._ignored], root_rank=0)
        self._sent = self._versions()
        self._hook = model.register_forward_pre_hook(self._before_forward) if broadcast_buffers else None

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        trains = torch.is_grad_enabled()
        if not trains and not self._in_evaluation:
            return
        if self._due:
            self._send_changed()
        self._due = trains and not self.paused

    def _send_changed(self) -> None:
        """Send the buffers, unless nothing has written to any: most models have constant ones only."""
        now = self._versions()
        if len(now) != len(self._sent) or any(
            a is not b or before != after for (a, before), (b, after) in zip(self._sent, now, strict=True)
        ):
            _broadcast_flat(buffer for buffer, _ in now)
            self._sent = self._versions()

    def _versions(self) -> list[tuple[torch.Tensor, int]]:
        """Return the buffers, each with the number of times that it was written to."""
        return [
            (buffer, -1 if buffer.is_inference() else buffer._version)
            for name, buffer in self.model.named_buffers()
            if name not in self._ignored
        ]

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()


def _broadcast_flat(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors with rank 0's; one broadcast for each type."""
    alike: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    with torch.no_grad():
        for (dtype, _), same in alike.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            broadcast_(flat, 0, name=f"commsched.buffers.{dtype}")
            for tensor, values in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(values.view_as(tensor))
