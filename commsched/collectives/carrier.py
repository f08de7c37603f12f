"""What an engine must do: the narrow face between Horovod's API (``ops.py``) and whatever carries
it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from commsched.process.launch import Launch

if TYPE_CHECKING:
    from commsched.process.rendezvous import Meeting


class ReduceOp(IntEnum):
    """How a reduction combines the ranks' values; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True)
class Built:
    """What an engine was built with and has enabled, as Horovod's ``*_built`` and ``*_enabled`` ask."""

    mpi_enabled: bool = False
    mpi_built: bool = False
    gloo_enabled: bool = False
    gloo_built: bool = False
    nccl_built: int = 0
    ddl_built: bool = False
    ccl_built: bool = False
    cuda_built: bool = False
    rocm_built: bool = False


@dataclass(frozen=True)
class Reduction:
    """The arguments that every reduction has."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


class Engine(ABC):
    """Named asynchronous collectives for one process. Every method that returns an ``int`` returns a
    handle."""

    name: str
    launch: Launch
    meeting: Meeting

    def __init__(self) -> None:
        self._unnamed: defaultdict[tuple[int, str], itertools.count[int]] = defaultdict(itertools.count)
        self._joins = 0

    def operation_name(self, prefix: str, set_id: int, name: str | None) -> str:
        """`name`, or the number of this call among the process set's unnamed ones of its kind.

        Counting per process set keeps the numbers equal on ranks that are in different sets.
        """
        return name if name is not None else f"noname.{self._joins}.{next(self._unnamed[set_id, prefix])}"

    def restart_numbering(self) -> None:
        """Ranks that joined early called less than the others; from here on all count from 0 again."""
        self._joins += 1
        self._unnamed.clear()

    @classmethod
    @abstractmethod
    def built(cls) -> Built:
        """What this engine is made of; does not need an instance."""

    @property
    def cross(self) -> tuple[int, int]:
        """(index, count) of this rank's node among the nodes that have its local rank."""
        return self.meeting.cross

    def mpi_threads_supported(self) -> bool:
        """Whether several threads may call MPI; ``ValueError`` where MPI does not carry this engine."""
        raise ValueError(
            "MPI does not carry this job: start it with mpirun and COMMSCHED_RUNTIME=horovod to use MPI"
        )

    @abstractmethod
    def shutdown(self) -> None:
        """Tell the other ranks, finish what has begun, let go of everything."""

    @abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Collective over all ranks: the id of a new process set, None where a set of these ranks exists."""

    @abstractmethod
    def remove_process_set(self, set_id: int) -> bool:
        """Collective over all ranks: forget a process set."""

    @abstractmethod
    def process_set_ranks(self, set_id: int) -> list[int]:
        """The ranks of a process set, sorted."""

    @abstractmethod
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
        """Start combining each tensor with its likes on the other ranks."""

    @abstractmethod
    def allgather(
        self, tensors: Sequence[torch.Tensor], *, name: str | None, set_id: int, grouped: bool
    ) -> int:
        """Start concatenating, on the first dimension, each tensor of all ranks."""

    @abstractmethod
    def broadcast(
        self, tensor: torch.Tensor, root: int, *, name: str | None, set_id: int, inplace: bool
    ) -> int:
        """Start copying rank `root`'s tensor to all ranks."""

    @abstractmethod
    def alltoall(
        self, tensor: torch.Tensor, splits: torch.Tensor | None, *, name: str | None, set_id: int
    ) -> int:
        """Start sending a slice of the first dimension to every rank."""

    @abstractmethod
    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        reduction: Reduction,
        *,
        name: str | None,
        set_id: int,
        grouped: bool,
    ) -> int:
        """Start combining each tensor over the ranks, every rank keeping its part of the first dimension."""

    @abstractmethod
    def barrier(self, set_id: int) -> None:
        """Wait for every rank of the set."""

    @abstractmethod
    def join(self, device: int) -> int:
        """Take part with zeros in the others' all-reduces until everybody has joined; the rank that came
        last."""

    @abstractmethod
    def poll(self, handle: int) -> bool:
        """Whether ``synchronize(handle)`` would return at once."""

    @abstractmethod
    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result (None for a handle that was already waited for)."""

    @abstractmethod
    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begin to record operations in `path` (on rank 0)."""

    @abstractmethod
    def stop_timeline(self) -> None:
        """End the recording and complete its file."""
