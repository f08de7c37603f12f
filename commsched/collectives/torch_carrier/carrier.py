"""The engine on torch.distributed alone: no Horovod, under any launcher.

The calling thread submits named operations; rank 0's coordinator says when an operation is ready everywhere
and in which order operations run; one thread per process runs them in that order.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from commsched.collectives.carrier import Built, Engine, ReduceOp, Reduction
from commsched.collectives.torch_carrier.argument_checks import check_splits, check_tensors, even_splits
from commsched.collectives.torch_carrier.operation_queue import Operation, Worker
from commsched.collectives.torch_carrier.timeline import Timeline
from commsched.errors import CommError
from commsched.process.launch import Launch
from commsched.process.rendezvous import meet


class TorchEngine(Engine):
    """Gloo for CPU tensors, NCCL for GPU tensors where every rank has a GPU of its own."""

    name = "torch"

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch
        self.meeting = meet(launch)
        self._worker = Worker(self.meeting)
        self._sets: dict[int, list[int]] = {0: list(range(launch.size))}
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

    def shutdown(self) -> None:
        self._worker.close()

    # -- process sets
    # ------------------------------------------------------------------------------------------------

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        message = self._wait_for_control("add_process_set", list(ranks))
        if message["new_set"] is not None:
            self._sets[message["new_set"]] = list(ranks)
        return message["new_set"]

    def remove_process_set(self, set_id: int) -> bool:
        removed = bool(self._wait_for_control("remove_process_set", [set_id])["removed"])
        self._sets.pop(set_id, None)
        return removed

    def _wait_for_control(self, kind: str, ranks: list[int]) -> dict[str, Any]:
        return self.synchronize(self._submit(kind, (), None, 0, ranks=ranks))

    def process_set_ranks(self, set_id: int) -> list[int]:
        try:
            return self._sets[set_id]
        except KeyError:
            raise ValueError(f"process set {set_id} is not registered; known: {sorted(self._sets)}") from None

    # -- collectives
    # -------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        reduction: Reduction,
        *,
        name: str | None,
        set_id: int,
        inplace: bool,
        grouped: bool,
    ) -> int:
        check_tensors("allreduce", tensors, reduces=True)
        if reduction.op is ReduceOp.ADASUM:
            _check_adasum(tensors, self.launch.size, set_id)
        outputs = list(tensors) if inplace else [torch.empty_like(tensor) for tensor in tensors]
        return self._submit("allreduce", tensors, name, set_id, outputs, grouped, reduction=reduction)

    def allgather(
        self, tensors: Sequence[torch.Tensor], *, name: str | None, set_id: int, grouped: bool
    ) -> int:
        check_tensors("allgather", tensors)
        return self._submit("allgather", tensors, name, set_id, grouped=grouped)

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, name: str | None, set_id: int, inplace: bool
    ) -> int:
        check_tensors("broadcast", [tensor])
        if root not in self.process_set_ranks(set_id):
            raise ValueError(
                f"broadcast's root_rank must be one of the ranks {self.process_set_ranks(set_id)}, but is "
                f"{root}"
            )
        outputs = [tensor if inplace else torch.empty_like(tensor)]
        return self._submit("broadcast", [tensor], name, set_id, outputs, root=root)

    def alltoall(
        self, tensor: torch.Tensor, splits: torch.Tensor | None, *, name: str | None, set_id: int
    ) -> int:
        check_tensors("alltoall", [tensor])
        size = len(self.process_set_ranks(set_id))
        parts = even_splits(tensor, size) if splits is None else check_splits(tensor, splits, size)
        template = torch.empty(0, dtype=torch.int32) if splits is None else splits
        return self._submit("alltoall", [tensor], name, set_id, splits=parts, template=template)

    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        reduction: Reduction,
        *,
        name: str | None,
        set_id: int,
        grouped: bool,
    ) -> int:
        check_tensors("reducescatter", tensors, reduces=True)
        if reduction.op is ReduceOp.ADASUM:
            raise CommError("reducescatter can not use op=Adasum; use Sum, Average, Min, Max or Product")
        return self._submit("reducescatter", tensors, name, set_id, grouped=grouped, reduction=reduction)

    def barrier(self, set_id: int) -> None:
        self.synchronize(self._submit("barrier", (), None, set_id))

    def join(self, device: int) -> int:
        last = self._worker.join(torch.device("cpu") if device < 0 else torch.device("cuda", device))
        self.restart_numbering()
        return last

    def _submit(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        set_id: int,
        outputs: Sequence[torch.Tensor] = (),
        grouped: bool = False,
        *,
        reduction: Reduction | None = None,
        root: int = -1,
        splits: list[int] | None = None,
        ranks: list[int] | None = None,
        template: torch.Tensor | None = None,
    ) -> int:
        members = self.process_set_ranks(set_id)
        if self.launch.rank not in members:
            raise ValueError(
                f"rank {self.launch.rank} is not in process set {set_id} of ranks {members}; only its "
                "members may call its operations"
            )
        prefix = f"grouped_{kind}" if grouped else kind
        with self._lock:
            number = next(self._numbers)
            full = f"{prefix}.{self.operation_name(prefix, set_id, name)}"
            operation = Operation(
                kind,
                full,
                set_id,
                tuple(tensors),
                tuple(outputs),
                grouped,
                reduction,
                root,
                splits,
                ranks,
                template,
            )
            self._worker.submit(operation)
            self._handles[number] = operation
        return number

    def poll(self, handle: int) -> bool:
        try:
            return self._handles[handle].done.is_set()
        except KeyError:
            raise ValueError(
                f"handle {handle} does not exist, or synchronize() has been called for it"
            ) from None

    def synchronize(self, handle: int) -> Any:
        operation = self._handles.pop(handle, None)
        return None if operation is None else self._worker.wait(operation)

    # -- timeline
    # ----------------------------------------------------------------------------------------------------

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        self.stop_timeline()
        if self.launch.rank == 0:
            self._worker.timeline = Timeline(path, self.launch.rank, mark_cycles)

    def stop_timeline(self) -> None:
        timeline, self._worker.timeline = self._worker.timeline, None
        if timeline is not None:
            timeline.close()


def _check_adasum(tensors: Sequence[torch.Tensor], size: int, set_id: int) -> None:
    if set_id != 0:
        raise NotImplementedError("Adasum does not support process sets; use the global one")
    if size & (size - 1):
        raise NotImplementedError(f"Adasum needs a power of two as number of ranks, but there are {size}")
    if any(not tensor.dtype.is_floating_point for tensor in tensors):
        raise ValueError("Adasum needs floating-point tensors")
