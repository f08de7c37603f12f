"""Runs one agreed operation on this rank, over NCCL, or over a channel to which GPU tensors are copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier import algorithms
from commsched.collectives.torch_carrier.negotiation import Key, Message
from commsched.collectives.torch_carrier.rank_group import ChannelGroup, NcclGroup, RankGroup
from commsched.env import settings
from commsched.errors import CommError
from commsched.process.groups import device_name, messages_between, nccl_group, nccl_usable
from commsched.process.rendezvous import Meeting


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


class OperationRunner:
    """Runs operations and owns the groups of the process sets. Used by one thread; ``abort`` by any.

    `process_sets` holds every set's ranks by its id; operations that add and remove sets change it.
    """

    def __init__(self, meeting: Meeting, process_sets: dict[int, list[int]]) -> None:
        self._meeting, self._sets = meeting, process_sets
        self._groups: dict[tuple[int, str], RankGroup] = {}
        self.joined_on = torch.device("cpu")  # after join(), this rank's zeros are on this device

    @torch.no_grad()  # autograd.py computes gradients
    def run(self, operation: Operation | None, message: Message) -> Any:
        """Return the operation's result. `operation` is None on a rank that has joined."""
        request = message["request"]
        kind, set_id = request["kind"], request["set"]
        if kind == "add_process_set":
            if message["new_set"] is not None:
                self._sets[message["new_set"]] = request["ranks"]
            return message
        if kind == "remove_process_set":
            self._remove_set(request["ranks"][0])
            return message
        if kind == "barrier":
            return None  # it runs once every rank has called it: nothing is left to do
        if operation is None:
            operation = self._zeros(request)
        # A joined rank's zeros may be on the CPU. Its device name then says so: all ranks use the CPU.
        if request["device"] == "cpu" or operation.tensors[0].device.type == "cpu":
            return self._run_in(self._group(set_id, "cpu"), operation, message)
        return self._run_on_gpu(operation, message)

    def _remove_set(self, set_id: int) -> None:
        self._sets.pop(set_id, None)
        for key in [key for key in self._groups if key[0] == set_id]:
            self._groups.pop(key).close()

    def _zeros(self, request: Message) -> Operation:
        device = torch.device("cpu") if request["device"] == "cpu" else self.joined_on
        tensors = tuple(
            torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            for shape, dtype in zip(request["shapes"], request["dtypes"], strict=True)
        )
        reduction = Reduction(ReduceOp(request["op"]), request["prescale"], request["postscale"])
        return Operation(
            request["kind"], request["name"], request["set"], tensors, tensors, reduction=reduction
        )

    def _group(self, set_id: int, kind: str) -> RankGroup:
        """Return the process set's group of this kind, "cpu" or "nccl"; its first use connects the ranks."""
        if (set_id, kind) not in self._groups:
            members, meeting = self._sets[set_id], self._meeting
            name, place = f"collectives/{set_id}/{kind}", members.index(meeting.launch.rank)
            group: RankGroup
            if kind == "cpu":
                channel = messages_between(meeting, name, members, settings().timeout)
                group = ChannelGroup(channel, place, len(members))
            else:
                group = NcclGroup(nccl_group(meeting.store, name, place, len(members)))
            self._groups[set_id, kind] = group
        return self._groups[set_id, kind]

    def _run_on_gpu(self, operation: Operation, message: Message) -> Any:
        """Use NCCL if every rank has a GPU of its own, else the CPU."""
        device, set_id, names = operation.tensors[0].device, operation.set_id, message["devices"]
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            stream = torch.cuda.current_stream(device)
            if operation.ready is not None:
                stream.wait_event(operation.ready[1])
            if len(names) == 1:  # one rank: nothing leaves this GPU
                result = self._run_in(self._group(set_id, "cpu"), operation, message)
            elif nccl_usable(names):
                result = self._run_in(self._group(set_id, "nccl"), operation, message)
            else:
                result = self._run_through_cpu(operation, message)
            stream.synchronize()
        if operation.ready is not None:
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.is_cuda:  # allocated on our stream, used on the caller's
                    tensor.record_stream(operation.ready[0])
        return result

    def _run_through_cpu(self, operation: Operation, message: Message) -> Any:
        staged = replace(
            operation,
            tensors=tuple(t.cpu() for t in operation.tensors),
            outputs=tuple(t.cpu() for t in operation.outputs),
        )
        result = self._run_in(self._group(operation.set_id, "cpu"), staged, message)
        if operation.outputs:
            for target, source in zip(operation.outputs, staged.outputs, strict=True):
                target.copy_(source)
            return _one_or_all(operation, operation.outputs)
        device = operation.tensors[0].device
        if operation.kind == "alltoall":  # the received splits stay on the splits' device
            return result[0].to(device), result[1]
        if operation.grouped:
            return tuple(part.to(device) for part in result)
        return result.to(device)

    def _run_in(self, group: RankGroup, operation: Operation, message: Message) -> Any:
        """Run one of the five collectives among the ranks of `group`."""
        tensors, outputs, reduction = operation.tensors, operation.outputs, operation.reduction
        if operation.kind == "broadcast":
            root = self._sets[operation.set_id].index(operation.root)
            algorithms.broadcast(group, tensors[0], outputs[0], root)
            return outputs[0]
        if operation.kind == "alltoall":
            return _alltoall(group, operation, message["splits"])
        if operation.kind == "allgather":
            rows = message["rows"]
            results = [
                algorithms.allgather(group, t, [row[i] for row in rows]) for i, t in enumerate(tensors)
            ]
            return _one_or_all(operation, results)
        assert reduction is not None
        if operation.kind == "allreduce":
            algorithms.allreduce(group, tensors, outputs, reduction)
            return _one_or_all(operation, outputs)
        return _one_or_all(operation, [algorithms.reducescatter(group, t, reduction) for t in tensors])

    def abort(self, reason: str) -> None:
        """End the running collective, from another thread: a rank that it waits for has died."""
        for group in list(self._groups.values()):
            group.abort(reason)

    def close(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()


def _one_or_all(operation: Operation, results: Sequence[torch.Tensor]) -> Any:
    return tuple(results) if operation.grouped else results[0]


def _alltoall(group: RankGroup, operation: Operation, splits: list[list[int]]) -> Any:
    assert operation.received_splits is not None
    tensor = operation.tensors[0][: sum(splits[group.rank])]
    result, received = algorithms.alltoall(group, tensor, splits)
    like = operation.received_splits
    return result, torch.tensor(received, dtype=like.dtype, device=like.device)
