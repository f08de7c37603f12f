"""Runs one agreed operation on this rank: picks the wires, moves tensors to where the wires are, calls the
collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from commsched.collectives.carrier import ReduceOp, Reduction
from commsched.collectives.torch_carrier import algorithms as collectives
from commsched.collectives.torch_carrier.negotiation import Message
from commsched.collectives.torch_carrier.operation import Operation
from commsched.collectives.torch_carrier.rank_group import GlooWires, NcclWires, Wires
from commsched.process.groups import gloo_group, nccl_group, nccl_usable
from commsched.process.rendezvous import Meeting


class Executor:
    """Knows the process sets' wires. Only the running thread (or, alone, the calling thread) uses it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._members: dict[int, list[int]] = {0: list(range(meeting.launch.size))}
        self._wires: dict[tuple[int, str], Wires] = {}
        # Where this rank's zeros are while it has joined: what it gave join(), by default the CPU.
        self.joined_on = torch.device("cpu")
        self._run_kind: dict[str, Callable[[Operation, Message, Wires], Any]] = {
            "allreduce": _allreduce,
            "allgather": _allgather,
            "broadcast": self._broadcast,
            "alltoall": _alltoall,
            "reducescatter": _reducescatter,
        }

    def record_ready(self, operation: Operation) -> Any:
        """The caller's GPU stream and a mark on it: before it the inputs may still be being computed."""
        if operation.tensors and operation.tensors[0].is_cuda:
            stream = torch.cuda.current_stream(operation.tensors[0].device)
            return stream, stream.record_event()
        return None

    @torch.no_grad()  # gradients through collectives are autograd.py's business
    def run(self, operation: Operation | None, message: Message) -> Any:
        """The operation's result; `operation` is None on a rank that has joined."""
        request = message["request"]
        if request["kind"] == "add_process_set":
            return self._add_set(request["ranks"], message)
        if request["kind"] == "remove_process_set":
            return self._remove_set(request["ranks"][0], message)
        if request["kind"] == "barrier":
            return None  # that every rank of the set has come is all there is to it
        if operation is None:
            operation = self._zeros(request)
        # Zeros on the CPU: their rank's name is no GPU's, so the others come through the CPU too.
        if request["device"] == "cpu" or operation.tensors[0].device.type == "cpu":
            return self._run_kind[request["kind"]](operation, message, self._gloo(request["set"]))
        return self._run_on_gpu(operation, message)

    def _add_set(self, ranks: list[int], message: Message) -> Message:
        if self._meeting.launch.size == 1:
            return {"new_set": None}
        if message["new_set"] is not None:
            self._members[message["new_set"]] = ranks
        return message

    def _remove_set(self, set_id: int, message: Message) -> Message:
        self._members.pop(set_id, None)
        for key in [key for key in self._wires if key[0] == set_id]:
            del self._wires[key]
        return message

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

    def _gloo(self, set_id: int) -> Wires:
        key = (set_id, "gloo")
        if key not in self._wires:
            members, launch = self._members[set_id], self._meeting.launch
            place = members.index(launch.rank)
            self._wires[key] = GlooWires(
                gloo_group(self._meeting.store, f"wires/{set_id}", place, members, self._meeting.address)
            )
        return self._wires[key]

    def _nccl(self, set_id: int) -> Wires:
        key = (set_id, "nccl")
        if key not in self._wires:
            members = self._members[set_id]
            place = members.index(self._meeting.launch.rank)
            self._wires[key] = NcclWires(
                nccl_group(self._meeting.store, f"wires/{set_id}", place, len(members))
            )
        return self._wires[key]

    def _run_on_gpu(self, operation: Operation, message: Message) -> Any:
        """Over NCCL where every rank has a GPU of its own, else through the CPU."""
        device, request = operation.tensors[0].device, message["request"]
        run = self._run_kind[request["kind"]]
        names = message.get("devices", [request["device"]])
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
            stream = torch.cuda.current_stream(device)
            if operation.ready is not None:
                stream.wait_event(operation.ready[1])
            if len(names) == 1:  # nothing leaves this GPU
                result = run(operation, message, self._gloo(request["set"]))
            elif nccl_usable(names):
                result = run(operation, message, self._nccl(request["set"]))
            else:
                result = self._through_cpu(operation, message, run)
            stream.synchronize()
        if operation.ready is not None:
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.is_cuda:  # made on our stream, to be used on the caller's
                    tensor.record_stream(operation.ready[0])
        return result

    def _through_cpu(
        self, operation: Operation, message: Message, run: Callable[[Operation, Message, Wires], Any]
    ) -> Any:
        staged = replace(
            operation,
            tensors=tuple(t.cpu() for t in operation.tensors),
            outputs=tuple(t.cpu() for t in operation.outputs),
        )
        result = run(staged, message, self._gloo(message["request"]["set"]))
        if operation.outputs:
            for target, source in zip(operation.outputs, staged.outputs, strict=True):
                target.copy_(source)
            return operation.outputs if operation.grouped else operation.outputs[0]
        return _to(result, operation.tensors[0].device, keep=operation.template)

    def _broadcast(self, operation: Operation, message: Message, wires: Wires) -> Any:
        root = self._members[message["request"]["set"]].index(operation.root)
        collectives.broadcast(wires, operation.tensors[0], operation.outputs[0], root)
        return operation.outputs[0]

    def abort(self) -> None:
        """End, from another thread, the collective that runs: a rank it waits for has died."""
        for wires in list(self._wires.values()):
            wires.abort()

    def close(self) -> None:
        self._wires.clear()


def _to(result: Any, device: torch.device, keep: torch.Tensor | None) -> Any:
    if isinstance(result, tuple) and keep is not None:  # alltoall: received splits stay where splits were
        return result[0].to(device), result[1]
    if isinstance(result, tuple):
        return tuple(part.to(device) for part in result)
    return result.to(device)


def _allreduce(operation: Operation, message: Message, wires: Wires) -> Any:
    assert operation.reduction is not None
    collectives.allreduce(wires, operation.tensors, operation.outputs, operation.reduction)
    return operation.outputs if operation.grouped else operation.outputs[0]


def _allgather(operation: Operation, message: Message, wires: Wires) -> Any:
    gathered = tuple(
        collectives.allgather(wires, tensor, [row[i] for row in message["rows"]])
        for i, tensor in enumerate(operation.tensors)
    )
    return gathered if operation.grouped else gathered[0]


def _alltoall(operation: Operation, message: Message, wires: Wires) -> Any:
    assert operation.template is not None
    tensor, splits = operation.tensors[0], message["splits"]
    if sum(splits[wires.rank]) < tensor.shape[0]:
        tensor = tensor[: sum(splits[wires.rank])]
    result, received = collectives.alltoall(wires, tensor, splits)
    template = operation.template
    return result, torch.tensor(received, dtype=template.dtype, device=template.device)


def _reducescatter(operation: Operation, message: Message, wires: Wires) -> Any:
    assert operation.reduction is not None
    scattered = tuple(
        collectives.reducescatter(wires, tensor, operation.reduction) for tensor in operation.tensors
    )
    return scattered if operation.grouped else scattered[0]
