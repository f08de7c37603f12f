"""One submitted operation of this rank, from submission to its result."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from commsched.collectives.carrier import Reduction
from commsched.collectives.torch_carrier.negotiation import Key, Message
from commsched.errors import CommError


def device_name(tensors: Sequence[torch.Tensor], node: str) -> str:
    """Where tensors live, told so that two ranks on one GPU give the same name."""
    if not tensors or tensors[0].device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(tensors[0].device)
    return f"cuda:{node}:{getattr(properties, 'uuid', tensors[0].device.index)}"


@dataclass
class Operation:
    """One submitted operation of this rank and, once `done`, its result or its error."""

    kind: str
    name: str
    set_id: int
    tensors: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    grouped: bool = False
    reduction: Reduction | None = None
    root: int = -1
    splits: list[int] | None = None
    ranks: list[int] | None = None
    template: torch.Tensor | None = None
    submitted: float = 0.0
    ready: Any = None
    result: Any = None
    error: CommError | None = None
    problem: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> Key:
        return self.set_id, self.name

    def request(self, node: str) -> Message:
        """What the other ranks must know of it."""
        message: Message = {
            "type": "request",
            "kind": self.kind,
            "name": self.name,
            "set": self.set_id,
            "dtypes": [str(t.dtype) for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
            "device": device_name(self.tensors, node),
        }
        if self.reduction is not None:
            message |= {
                "op": int(self.reduction.op),
                "prescale": self.reduction.prescale,
                "postscale": self.reduction.postscale,
            }
        for name in ("root", "splits", "ranks"):
            message[name] = getattr(self, name)
        return message

    def finish(self, result: Any = None, error: CommError | None = None) -> None:
        if not self.done.is_set():
            self.result, self.error = result, error
            self.done.set()
