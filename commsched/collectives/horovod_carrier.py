"""Carries the collectives by calling an installed Horovod."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from comm_core import Waiting, ask_store
from commsched.collectives.carrier import Built, Carrier, Collective, JoinHandle, OperationNames
from commsched.env import settings
from commsched.errors import CommError
from commsched.process.launch import Launch
from commsched.process.rendezvous import Meeting, launcher_server, meet

if TYPE_CHECKING:
    from types import ModuleType


def load_horovod() -> ModuleType:
    """Return ``horovod.torch.mpi_ops``; ``CommError`` says whether Horovod is missing or broken."""
    try:
        import horovod.torch.mpi_ops as mpi_ops
    except ModuleNotFoundError as error:
        if error.name not in ("horovod", "horovod.torch"):
            raise CommError(_broken(error)) from error
        raise CommError(
            "Horovod is not installed; install it with docker/install.sh, or set COMMSCHED_RUNTIME=torch to "
            "run without it"
        ) from error
    except Exception as error:  # a Horovod built for another torch fails with ImportError, OSError and others
        raise CommError(_broken(error)) from error
    return mpi_ops


def _broken(error: Exception) -> str:
    return (
        f"Horovod is installed but can not be loaded ({type(error).__name__}: {error}); it was probably "
        "built for another torch: build it again with docker/install.sh, or set COMMSCHED_RUNTIME=torch to "
        "run without it"
    )


@contextmanager
def _stall_limits() -> Iterator[None]:
    """Give Horovod our limits while it starts: by default it waits for an absent rank for ever.

    It gives up only where it warns, and not before that.
    """
    now = settings()
    seconds = max(2, int(now.timeout))
    limits = {
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(min(now.warning, seconds)))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
    }
    users = {name: os.environ.get(name) for name in limits}
    os.environ.update(limits)
    try:
        yield
    finally:  # the next init() reads what the user has set
        for name, value in users.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _own_errors(horovod: ModuleType) -> Iterator[None]:
    """Turn Horovod's failures into ``CommError``; its ``ValueError`` pass."""
    try:
        yield
    except horovod.HorovodInternalError as error:
        raise CommError(f"Horovod: {error}") from error


class HorovodCarrier(Carrier):
    """Calls Horovod, whose background thread runs the collectives."""

    name = "horovod"

    def __init__(self, launch: Launch) -> None:
        self._horovod = load_horovod()
        if launch.launcher in ("torchrun", "slurm") and launch.size > 1:
            raise CommError(
                f"Horovod can not run under {launch.launcher}; start the script with horovodrun or mpirun, "
                "or unset COMMSCHED_RUNTIME"
            )
        os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
        with _stall_limits():
            if launch.mpi and launch.size > 1:
                # Only one library may initialise MPI in a process, and Horovod must be it: Horovod starts
                # first and then broadcasts rank 0's address.
                self._horovod.init()
                self.meeting = meet(launch, self._broadcast)
            else:
                self.meeting = meet(launch)
                _forget_former_init(self.meeting)
                self._horovod.init()
        self.launch = launch
        self._names = OperationNames()
        self._join: JoinHandle | None = None
        self._sets = {0: self._horovod.global_process_set}
        found = (self._horovod.rank(), self._horovod.size())
        if found != (self.launch.rank, self.launch.size):
            raise CommError(
                f"the launcher says rank {self.launch.rank} of {self.launch.size}, Horovod says rank "
                f"{found[0]} of {found[1]}; was Horovod built without the launcher's MPI?"
            )

    def _broadcast(self, value: dict[str, object] | None) -> dict[str, object]:
        from horovod.torch.functions import broadcast_object

        with _own_errors(self._horovod):
            return broadcast_object(value, 0, name="commsched.rendezvous")

    @classmethod
    def built(cls) -> Built:
        horovod = load_horovod()
        return Built(**{name: getattr(horovod, name)() for name in Built.__dataclass_fields__})

    def mpi_threads_supported(self) -> bool:
        return bool(self._horovod.mpi_threads_supported())

    def shutdown(self, error: str) -> None:
        self._horovod.shutdown()

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        try:
            added = self._horovod.add_process_set(list(ranks))
        except ValueError as error:
            if "duplicate" in str(error):
                return None
            raise
        self._sets[added.process_set_id] = added
        self._all_returned()
        return int(added.process_set_id)

    def remove_process_set(self, set_id: int) -> bool:
        known = self._sets.pop(set_id, None)
        removed = known is not None and bool(self._horovod.remove_process_set(known))
        if removed:
            self._all_returned()
        return removed

    def _all_returned(self) -> None:
        """Wait until Horovod's call has returned on every rank.

        Horovod polls once in a millisecond whether the process set exists. A rank that polls after a faster
        one has shut down would get the error "Horovod is shutting down".
        """
        self.barrier(0)

    def process_set_ranks(self, set_id: int) -> list[int]:
        return list(range(self.launch.size)) if set_id == 0 else list(self._set(set_id).ranks)

    def start(self, collective: Collective) -> int:
        kind = f"{'grouped_' * collective.grouped}{collective.kind}"
        function = getattr(self._horovod, f"{kind}_async{'_' * collective.inplace}")
        arguments: list[Any] = [collective.tensors if collective.grouped else collective.tensors[0]]
        options: dict[str, Any] = {}
        if collective.kind == "broadcast":
            arguments.append(collective.root)
        elif collective.kind == "alltoall":
            arguments.append(collective.splits)
        elif collective.reduction is not None:
            options = {
                "op": int(collective.reduction.op),
                "prescale_factor": collective.reduction.prescale,
                "postscale_factor": collective.reduction.postscale,
            }
        options["name"] = self._names.choose(kind, collective.set_id, collective.name)
        with _own_errors(self._horovod):
            return function(*arguments, process_set=self._set(collective.set_id), **options)

    def barrier(self, set_id: int) -> None:
        with _own_errors(self._horovod):
            self._horovod.barrier(process_set=self._set(set_id))

    def start_join(self, device: int) -> JoinHandle:
        """Do what ``horovod.torch.join()`` does, in two halves: that function waits, this one must not."""
        if self._join is not None:  # a call that raised an error has begun it
            return self._join
        last = torch.tensor(-1, dtype=torch.int32, device="cpu")
        try:
            handle = self._horovod.mpi_lib.horovod_torch_join(last, device)
        except RuntimeError as error:
            raise CommError(f"Horovod: {error}") from error
        self._horovod._handle_map[handle] = None, last

        def wait() -> int:
            self._join = None
            result = int(self.synchronize(handle))
            self._names.restart()
            return result

        self._join = JoinHandle(lambda: self.poll(handle), wait)
        return self._join

    def poll(self, handle: int) -> bool:
        return bool(self._horovod.poll(handle))

    def synchronize(self, handle: int) -> Any:
        with _own_errors(self._horovod):
            return self._horovod.synchronize(handle)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        self._horovod.start_timeline(path, mark_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        self._horovod.stop_timeline()


def _forget_former_init(meeting: Meeting) -> None:
    """Delete the addresses of a former init() from horovodrun's server, so that a second one works.

    The server empties a scope once as many keys as ranks were deleted, but loses count when two scopes end
    together. Horovod would then dial a closed port and abort the process. All ranks are past shutdown() here.
    """
    server, launch = launcher_server(), meeting.launch
    if server is None or launch.size == 1:
        return
    if launch.rank == 0:
        for scope in {"global", *(f"local_{r.node}" for r in meeting.records)} | {
            f"cross_{r.local_rank}" for r in meeting.records
        }:
            for key in ("0", "rank_0"):
                server.clear(scope, key, tries=2 * launch.size)
    waiting = Waiting(launch.rank, settings().timeout)
    try:
        if launch.rank == 0:
            ask_store(waiting, meeting.store.set, "horovod/cleared", "yes")
        ask_store(waiting, meeting.store.wait, ["horovod/cleared"])
    except RuntimeError as error:
        raise CommError(
            f"rank {launch.rank} was not told that rank 0 has removed the addresses of an earlier init() from"
            f" horovodrun's server: {error}"
        ) from error
