"""Carries the collectives over torch.distributed alone: needs no Horovod and works under any launcher."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from commsched.collectives.carrier import Built, Carrier, Collective, JoinHandle, OperationNames
from commsched.collectives.torch_carrier.argument_checks import check, row_splits
from commsched.collectives.torch_carrier.operation_queue import OperationQueue
from commsched.collectives.torch_carrier.operation_runner import Operation
from commsched.collectives.torch_carrier.timeline import Timeline
from commsched.process.launch import Launch
from commsched.process.rendezvous import Publish, meet


class TorchCarrier(Carrier):
    """Uses a channel for CPU tensors, and NCCL for GPU tensors if every rank has a GPU of its own."""

    name = "torch"

    def __init__(self, launch: Launch, publish: Publish | None = None) -> None:
        self.launch = launch
        self.meeting = meet(launch, publish)
        self._sets: dict[int, list[int]] = {0: list(range(launch.size))}
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

    def shutdown(self) -> None:
        self._queue.close()

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        return self._change_process_sets("add_process_set", list(ranks))["new_set"]

    def remove_process_set(self, set_id: int) -> bool:
        return bool(self._change_process_sets("remove_process_set", [set_id])["removed"])

    def _change_process_sets(self, kind: str, ranks: list[int]) -> dict[str, Any]:
        return self.synchronize(self._submit(Operation(kind, "", 0, ranks=ranks)))

    def process_set_ranks(self, set_id: int) -> list[int]:
        try:
            return self._sets[set_id]
        except KeyError:
            raise ValueError(f"process set {set_id} is not registered; known: {sorted(self._sets)}") from None

    def start(self, collective: Collective) -> int:
        kind, tensors = collective.kind, tuple(collective.tensors)
        members = self.process_set_ranks(collective.set_id)
        check(collective, members, self.launch.size)
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
            return self._handles[handle].done.is_set()
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

        return JoinHandle(operation.done.is_set, wait)

    def report_progress(self) -> None:
        self._queue.report_progress()

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        self.stop_timeline()
        if self.launch.rank == 0:
            self._queue.timeline = Timeline(path, self.launch.rank, mark_cycles)

    def stop_timeline(self) -> None:
        self._queue.stop_timeline()
