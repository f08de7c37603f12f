"""The interface between Horovod's API and the carrier of its collectives: Horovod itself, or torch.

A caller passes the carrier a ``Collective``. A process has one carrier between ``init()`` and ``shutdown()``.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from commsched.errors import NotInitializedError

if TYPE_CHECKING:
    import torch

    from commsched.process.launch import Launch
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
class Reduction:
    """How to combine: inputs are multiplied by `prescale`, results by `postscale`."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


@dataclass(slots=True)
class Collective:
    """One call of ``allreduce``, ``allgather``, ``broadcast``, ``alltoall`` or ``reducescatter`` (`kind`).

    `tensors` has one element unless `grouped`. Without a `name` the carrier numbers the call. Only reductions
    have a `reduction`, broadcasts a `root` (a global rank), alltoalls `splits`.
    """

    kind: str
    tensors: Sequence[torch.Tensor]
    name: str | None
    set_id: int
    grouped: bool = False
    inplace: bool = False
    reduction: Reduction | None = None
    root: int = -1
    splits: torch.Tensor | None = None


@dataclass(frozen=True)
class Built:
    """The answers to Horovod's ``*_built`` and ``*_enabled`` functions."""

    mpi_enabled: bool = False
    mpi_built: bool = False
    gloo_enabled: bool = False
    gloo_built: bool = False
    nccl_built: int = 0
    ddl_built: bool = False
    ccl_built: bool = False
    cuda_built: bool = False
    rocm_built: bool = False


class OperationNames:
    """Numbers the operations that callers do not name.

    Counting per process set keeps the numbers equal on ranks that are in different sets.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[int, str], itertools.count[int]] = defaultdict(itertools.count)
        self._joins = 0

    def choose(self, kind: str, set_id: int, name: str | None) -> str:
        """Return `name`, or a name with the number of this call among the set's unnamed ones of its kind."""
        return name if name is not None else f"noname.{self._joins}.{next(self._counts[set_id, kind])}"

    def restart(self) -> None:
        """Count from 0 again after a join: ranks that joined early made fewer calls than the others."""
        self._joins += 1
        self._counts.clear()


@dataclass(frozen=True)
class JoinHandle:
    """A join that has begun. ``done()``: whether it has ended; ``wait()``: the rank that joined last."""

    done: Callable[[], bool]
    wait: Callable[[], int]


class Carrier(ABC):
    """Carries this process's collectives between ``init()`` and ``shutdown()``: Horovod or torch."""

    name: str
    launch: Launch
    meeting: Meeting
    _sets: dict[int, Any]  # the registered process sets by id

    @classmethod
    @abstractmethod
    def built(cls) -> Built:
        """Return what this carrier is made of; needs no instance."""

    @abstractmethod
    def mpi_threads_supported(self) -> bool:
        """Return whether several threads may call MPI; ``ValueError`` unless MPI carries the collectives."""

    @abstractmethod
    def shutdown(self, error: str) -> None:
        """Tell the other ranks (and the error that is the cause, if any), finish, close all connections."""

    @abstractmethod
    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the id of a new process set, None if a set of these ranks exists. All ranks must call."""

    @abstractmethod
    def remove_process_set(self, set_id: int) -> bool:
        """Remove a process set and return whether it existed. All ranks must call."""

    @abstractmethod
    def process_set_ranks(self, set_id: int) -> list[int]:
        """Return the sorted ranks of a process set; ``ValueError`` if it is not registered."""

    def _set(self, set_id: int) -> Any:
        try:
            return self._sets[set_id]
        except KeyError:
            raise ValueError(f"process set {set_id} is not registered; known: {sorted(self._sets)}") from None

    @abstractmethod
    def start(self, collective: Collective) -> int:
        """Start a collective and return its handle for ``poll`` and ``synchronize``."""

    @abstractmethod
    def poll(self, handle: int) -> bool:
        """Return whether ``synchronize(handle)`` would return at once."""

    @abstractmethod
    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result (None for a handle that was already waited for)."""

    @abstractmethod
    def barrier(self, set_id: int) -> None:
        """Wait for every rank of the process set."""

    @abstractmethod
    def start_join(self, device: int) -> JoinHandle:
        """Contribute zeros to the others' all-reduces until every rank has joined.

        Until then this rank may not start other operations. Called again before that, it goes on with the
        same join.
        """

    def report_progress(self, doing: str = "") -> None:
        """Keep a join from timing out while the others go on without operations of this carrier.

        ``doing``: what this rank does until its next operation, for the errors of those that wait for it.
        """

    @abstractmethod
    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Record rank 0's operations in `path`."""

    @abstractmethod
    def stop_timeline(self) -> None:
        """End the recording and complete its file."""


_carrier: Carrier | None = None
_epoch = 0


def carrier() -> Carrier:
    """Return the current carrier; ``NotInitializedError`` before ``init()`` and after ``shutdown()``."""
    if _carrier is None:
        raise NotInitializedError
    return _carrier


def carrier_or_none() -> Carrier | None:
    return _carrier


def epoch() -> int:
    """Return a number that changes with every ``init()`` and ``shutdown()``: a key for caches."""
    return _epoch


def set_carrier(new: Carrier | None) -> None:
    global _carrier, _epoch
    _carrier = new
    _epoch += 1
