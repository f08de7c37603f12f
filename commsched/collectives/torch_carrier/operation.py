"""One submitted operation of this rank, from submission to its result."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from commsched.collectives.carrier import Reduction
from commsched.collectives.torch_carrier.negotiation import Key, Message
from commsched.errors import CommError
from commsched.process.groups import device_name


@dataclass
class Operation:
    """A collective, a barrier or a change of process sets, and once `done` its result or its error."""

    kind: str
    name: str
    set_id: int
    tensors: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    grouped: bool = False
    reduction: Reduction | None = None
    root: int = -1
    splits: list[int] | None = None
    received_splits: torch.Tensor | None = None  # an alltoall's second result has its type and device
    ranks: list[int] | None = None  # add_process_set: the members; remove_process_set: the set's id
    submitted: float = 0.0
    ready: Any = None  # the caller's CUDA stream and an event on it
    result: Any = None
    error: CommError | None = None
    cause: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> Key:
        return self.set_id, self.name

    def request(self, node: str) -> Message:
        """Return what the coordinator and the other ranks need to know."""
        message: Message = {
            "type": "request",
            "kind": self.kind,
            "name": self.name,
            "set": self.set_id,
            "dtypes": [str(t.dtype) for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
            "device": device_name(self.tensors, node),
            "root": self.root,
            "splits": self.splits,
            "ranks": self.ranks,
        }
        if self.reduction is not None:
            message["op"] = int(self.reduction.op)
            message["prescale"] = self.reduction.prescale
            message["postscale"] = self.reduction.postscale
        return message

    def finish(self, result: Any = None, error: CommError | None = None) -> None:
        """Set the result or the error, unless the operation has ended already."""
        if not self.done.is_set():
            self.result, self.error = result, error
            self.done.set()
