"""Carries the collectives over torch.distributed alone: needs no Horovod and works under any launcher."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from commsched.collectives.carrier import Built, Carrier, Collective, JoinHandle, OperationNames, ReduceOp
from commsched.collectives.torch_carrier.operation_queue import Operation, OperationQueue, Timeline
from commsched.errors import CommError
from commsched.process.launch import Launch
from commsched.process.rendezvous import Publish, meet


class TorchCarrier(Carrier):
    """Uses a channel for CPU tensors, and NCCL for GPU tensors if every rank has a GPU of its own."""

    name = "torch"

    def __init__(self, launch: Launch, publish: Publish | None = None, patience: float | None = None) -> None:
        self.launch = launch
        self.meeting = meet(launch, publish, patience)
        self._sets = {0: list(range(launch.size))}
        self._queue = OperationQueue(self.meeting, self._sets)
        self._names = OperationNames()
        self._handles: dict[int, Operation] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        timeline = os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")
        if timeline != "DYNAMIC":
            self.start_timeline(timeline, False)

    @classmethod
    def built(cls) -> Built:
        distributed = torch.distributed
        nccl = distributed.is_nccl_available() and torch.version.cuda is not None
        version = torch.cuda.nccl.version() if nccl else (0, 0, 0)
        return Built(
            gloo_enabled=True,
            gloo_built=distributed.is_gloo_available(),
            nccl_built=version[0] * 10000 + version[1] * 100 + version[2],
            cuda_built=torch.version.cuda is not None,
            rocm_built=torch.version.hip is not None,
        )

    def mpi_threads_supported(self) -> bool:
        raise ValueError(
            "MPI does not carry this job: start it with mpirun and COMMSCHED_RUNTIME=horovod to use MPI"
        )

    def shutdown(self, error: str) -> None:
        self._queue.close(error)

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        return self._change_process_sets("add_process_set", list(ranks))["new_set"]

    def remove_process_set(self, set_id: int) -> bool:
        return bool(self._change_process_sets("remove_process_set", [set_id])["removed"])

    def _change_process_sets(self, kind: str, ranks: list[int]) -> dict[str, Any]:
        return self.synchronize(self._submit(Operation(kind, "", 0, ranks=ranks)))

    def process_set_ranks(self, set_id: int) -> list[int]:
        ranks: list[int] = self._set(set_id)
        return ranks

    def start(self, collective: Collective) -> int:
        kind, tensors = collective.kind, tuple(collective.tensors)
        members = self.process_set_ranks(collective.set_id)
        _check_arguments(collective, members, self.launch.size)
        operation = Operation(
            kind,
            "",
            collective.set_id,
            tensors,
            grouped=collective.grouped,
            reduction=collective.reduction,
            root=collective.root,
        )
        if kind in ("allreduce", "broadcast"):
            operation.outputs = tensors if collective.inplace else tuple(map(torch.empty_like, tensors))
        if kind == "alltoall":
            splits = collective.splits
            operation.splits = row_splits(tensors[0], splits, len(members))
            none = torch.empty(0, dtype=torch.int32, device="cpu")
            operation.received_splits = none if splits is None else splits
        return self._submit(operation, collective.name)

    def _submit(self, operation: Operation, name: str | None = None) -> int:
        kind, set_id, rank = operation.kind, operation.set_id, self.launch.rank
        members = self.process_set_ranks(set_id)
        if rank not in members:
            raise ValueError(
                f"rank {rank} is not in process set {set_id} of ranks {members}; only its members may call "
                "its operations"
            )
        prefix = f"{'grouped_' * operation.grouped}{kind}"
        with self._lock:
            operation.name = f"{prefix}.{self._names.choose(prefix, set_id, name)}"
            self._queue.submit(operation)
            handle = next(self._numbers)
            self._handles[handle] = operation
        return handle

    def poll(self, handle: int) -> bool:
        try:
            return self._queue.has_ended(self._handles[handle])
        except KeyError:
            raise ValueError(
                f"handle {handle} does not exist, or synchronize() has been called for it"
            ) from None

    def synchronize(self, handle: int) -> Any:
        operation = self._handles.pop(handle, None)
        return None if operation is None else self._queue.wait(operation)

    def barrier(self, set_id: int) -> None:
        self.synchronize(self._submit(Operation("barrier", "", set_id)))

    def start_join(self, device: int) -> JoinHandle:
        where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
        operation = self._queue.start_join(where)

        def wait() -> int:
            last = self._queue.wait_for_join(operation)
            self._names.restart()
            return last

        return JoinHandle(lambda: operation.ended, wait)

    def report_progress(self, doing: str = "") -> None:
        self._queue.report_progress(doing)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        self.stop_timeline()
        if self.launch.rank == 0:
            self._queue.timeline = Timeline(path, self.launch.rank, mark_cycles)

    def stop_timeline(self) -> None:
        self._queue.stop_timeline()


# -- checks of one rank's arguments that need no other rank --------------------------------------------------

_REDUCIBLE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
_MOVABLE = _REDUCIBLE | {torch.bool}


def _check_arguments(collective: Collective, members: Sequence[int], job_size: int) -> None:
    """Raise an error if the collective can not run on `members`, whatever the other ranks pass."""
    kind, tensors, reduction = collective.kind, collective.tensors, collective.reduction
    check_tensors(kind, tensors, reduces=reduction is not None)
    if kind == "broadcast" and collective.root not in members:
        raise ValueError(
            f"broadcast's root_rank must be one of the ranks {list(members)}, but is {collective.root}"
        )
    if reduction is not None and reduction.op is ReduceOp.ADASUM:
        _check_adasum(collective, job_size)


def check_tensors(kind: str, tensors: Sequence[torch.Tensor], reduces: bool = False) -> None:
    """Check types, memory layout and that a group's tensors are on one device."""
    allowed = _REDUCIBLE if reduces else _MOVABLE
    if not tensors:
        raise ValueError(f"a grouped {kind} needs at least one tensor")
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{kind} needs a dense tensor, but got {tensor.layout}; see sparse_allreduce_async"
            )
        if tensor.dtype not in allowed:
            raise ValueError(
                f"{kind} does not support tensors of type {tensor.dtype}; cast it to one of "
                f"{', '.join(sorted(str(t).removeprefix('torch.') for t in allowed))}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} needs a contiguous tensor; pass tensor.contiguous()")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            f"a grouped {kind} needs all its tensors on one device, but got "
            f"{sorted({str(tensor.device) for tensor in tensors})}"
        )
    for tensor in tensors:
        if not has_memory(tensor):
            raise ValueError(
                f"{kind} needs a tensor with memory of its own, but got a {type(tensor).__name__} on"
                f" {tensor.device}; of a tile of an image, pass tile.local, and of a loss, loss.item()"
            )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie where it says: not on meta, nor in a wrapper of others."""
    try:
        # A subclass may answer with the address of a tensor that it holds, whose size is another one.
        with torch._C.DisableTorchFunctionSubclass():
            return not tensor.is_meta and (not tensor.numel() or tensor.data_ptr() != 0)
    except RuntimeError:  # a wrapper without storage
        return False


def _check_adasum(collective: Collective, job_size: int) -> None:
    if collective.kind == "reducescatter":
        raise CommError("reducescatter can not use op=Adasum; use Sum, Average, Min, Max or Product")
    if collective.set_id != 0:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    if job_size & (job_size - 1):
        raise NotImplementedError(f"Adasum needs a power of two as number of ranks, but there are {job_size}")
    if any(not tensor.dtype.is_floating_point for tensor in collective.tensors):
        raise ValueError("Adasum needs floating-point tensors")


def row_splits(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> list[int]:
    """Return how many rows alltoall sends to each of `size` ranks: equal shares, or `splits` if they fit."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension that the {size} ranks divide evenly, but "
                f"it is {rows}; pass splits"
            )
        return [rows // size] * size
    if splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"alltoall's splits must be 32- or 64-bit integers, but are {splits.dtype}")
    parts: list[int] = splits.tolist()
    if splits.dim() != 1 or len(parts) != size:
        raise ValueError(
            f"alltoall's splits need one entry for each of {size} ranks, but have shape {list(splits.shape)}"
        )
    if min(parts) < 0 or sum(parts) > rows:
        raise ValueError(
            "alltoall's splits must be at least 0 and add up to at most the tensor's first dimension, "
            f"{rows}, but are {parts}"
        )
    return parts
