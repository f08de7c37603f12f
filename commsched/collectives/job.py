"""The job: ``init()``, ``shutdown()``, ranks, what the carrier is built with, process sets."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from comm_core import set_warning
from commsched.collectives.carrier import Built, Carrier, carrier, carrier_or_none, set_carrier
from commsched.env import settings
from commsched.errors import CommError
from commsched.process.launch import Launch, detect_launch

if TYPE_CHECKING:
    from commsched.process.rendezvous import Publish

_log = logging.getLogger("commsched")
_initialised_by = 0
_LONGEST_ERROR = 1000  # characters


def _carrier_class(launch: Launch) -> type[Carrier]:
    """Return the carrier that COMMSCHED_RUNTIME names; by default Horovod under horovodrun, else torch.

    Elastic jobs have torch's. Horovod itself would ask the driver for its place, and so must our store: the
    driver takes two questions of one process for two epochs. Horovod can also abort a process whose peer is
    lost.
    """
    name = settings().runtime
    if launch.elastic and name == "horovod":
        raise CommError(
            "COMMSCHED_RUNTIME is horovod, and in an elastic job commsched carries the collectives itself;"
            " unset it on every rank"
        )
    by_default = not name and launch.launcher == "horovodrun" and not launch.elastic
    if name == "horovod" or (by_default and importlib.util.find_spec("horovod") is not None):
        from commsched.collectives.horovod_carrier import HorovodCarrier

        return HorovodCarrier
    from commsched.collectives.torch_carrier.carrier import TorchCarrier

    return TorchCarrier


def _launch() -> Launch:
    settings.cache_clear()  # the environment may have changed since an earlier init()
    return detect_launch(os.environ, settings().launcher)


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job: find the other ranks and connect to them. Calling it again only adds process sets.

    Works under horovodrun, torchrun, mpirun, Slurm's srun, Ray Train and alone (one rank). `process_sets` are
    registered at once; they can always be added later, so Horovod's ``"dynamic"`` changes nothing. `comm` may
    only name all ranks: use process sets for fewer.

    In an elastic job of horovodrun, every ``init()`` after ``shutdown()`` begins the job's next epoch: it
    waits for the ranks that are left, which may get other numbers. A rank that is lost meanwhile costs an
    eighth of COMMSCHED_START_TIMEOUT, the next one a quarter, then half.
    """
    if carrier_or_none() is not None:
        _register(process_sets)
        return
    launch = renew()
    if comm is not None and list(comm) not in ([], list(range(launch.size))):
        raise ValueError(
            f"init(comm=...) must name all {launch.size} ranks, but got {comm!r}; for a subset of the ranks "
            "use init(process_sets=[ProcessSet(ranks)])"
        )
    _enter(_elastic_carrier(launch) if launch.elastic else _carrier_class(launch)(launch))  # type: ignore[call-arg]
    try:
        _register(process_sets)
    except Exception:
        shutdown()
        raise


def _elastic_carrier(launch: Launch) -> Carrier:
    """Meet the others, and ask for the next epoch after each failure: [Note: epochs] of ``rendezvous``."""
    carrier_class, begin, share = _carrier_class(launch), time.monotonic(), 1 / 8
    while True:
        patience = share * settings().start_timeout
        try:
            return carrier_class(launch, patience=patience)  # type: ignore[call-arg]
        except CommError as error:
            if share == 1:
                waited = time.monotonic() - begin
                raise CommError(
                    f"rank {launch.rank} of {launch.size} has not met the others for {waited:.0f} s, at last"
                    f" for the whole COMMSCHED_START_TIMEOUT ({patience:g} s): {error}"
                ) from error
            _log.warning(
                "rank %d of %d has not met the others within %g s, %g of COMMSCHED_START_TIMEOUT, and asks"
                " horovodrun for the next epoch: %s",
                *(launch.rank, launch.size, patience, share, str(error)),
            )
        share *= 2  # not within `except`: the error's traceback keeps the store of a rank 0 open
        launch = renew()


def renew() -> Launch:
    """Return this process's place in the job, of horovodrun's elastic driver if that tells it anew."""
    launch = _launch()
    if launch.elastic:
        from commsched.process import rendezvous

        rendezvous.renew(launch)
        launch = _launch()
    return launch


def join_framework(launch: Launch, publish: Publish) -> None:
    """Join a job whose ranks a framework has started and connected: ``publish`` broadcasts rank 0's value."""
    from commsched.collectives.torch_carrier.carrier import TorchCarrier

    settings.cache_clear()
    _enter(TorchCarrier(launch, publish))


def _enter(joined: Carrier) -> None:
    global _initialised_by
    _initialised_by = os.getpid()
    set_warning(settings().given_warning)
    set_carrier(joined)
    global_process_set.ranks = list(range(joined.launch.size))


def _register(process_sets: Sequence[ProcessSet] | str | None) -> None:
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"process_sets must be a list of ProcessSet or 'dynamic', but is {process_sets!r}"
            )
        return
    for process_set in process_sets or ():
        if process_set.process_set_id is None:
            add_process_set(process_set)


def shutdown() -> None:
    """Leave the job; ``init()`` may follow. Other ranks' operations with this rank raise ``CommError``."""
    leave(None)


def leave(error: BaseException | None) -> None:
    """Leave the job after an error, of which the other ranks hear: they may not have found its cause yet."""
    leaving = carrier_or_none()
    if leaving is None:
        return
    private_groups = sys.modules.get("commsched.collectives.private_groups")
    if private_groups is not None:  # None: no group was made
        private_groups.release_groups()
    set_carrier(None)
    for process_set in _added:  # the next carrier gives the same ids to other sets
        process_set.process_set_id = None
    _added.clear()
    leaving.shutdown(f"{type(error).__name__}: {error}"[:_LONGEST_ERROR] if error else "")


@atexit.register
def _leave_at_exit() -> None:
    """Leave the job, but not in a forked child: its parent stays."""
    if os.getpid() == _initialised_by:
        # An interactive session goes on after errors: its last one may be old.
        shown = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        leave(shown)


# -- this process and its job --------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether this process is between ``init()`` and ``shutdown()``."""
    return carrier_or_none() is not None


def rank() -> int:
    """Return this process's number in the job, from 0."""
    return carrier().launch.rank


def size() -> int:
    """Return the number of processes in the job."""
    return carrier().launch.size


def local_rank() -> int:
    """Return this process's number on its host, from 0; the usual choice of GPU."""
    return carrier().launch.local_rank


def local_size() -> int:
    """Return how many of the job's processes run on this host."""
    return carrier().launch.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a process of this local rank."""
    return carrier().meeting.cross[0]


def cross_size() -> int:
    """Return how many hosts have a process of this local rank."""
    return carrier().meeting.cross[1]


def engine_name() -> str:
    """Return what carries the collectives: ``"horovod"`` or ``"torch"``."""
    return carrier().name


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record every operation in `file_path` on rank 0 (open it in chrome://tracing)."""
    carrier().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording that ``start_timeline`` began."""
    carrier().stop_timeline()


def _built() -> Built:
    current = carrier_or_none()
    return (type(current) if current is not None else _carrier_class(_launch())).built()


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI; ``ValueError`` unless MPI carries the collectives."""
    return carrier().mpi_threads_supported()


def _capability(name: str, meaning: str) -> Callable[[], Any]:
    def answer() -> Any:
        return getattr(_built(), name)

    answer.__name__ = answer.__qualname__ = name
    answer.__doc__ = f"Return {meaning}."
    return answer


mpi_enabled = _capability("mpi_enabled", "whether MPI carries the collectives")
mpi_built = _capability("mpi_built", "whether the carrier was built with MPI")
gloo_enabled = _capability("gloo_enabled", "whether gloo carries the collectives")
gloo_built = _capability("gloo_built", "whether the carrier was built with gloo")
nccl_built = _capability("nccl_built", "NCCL's version as one integer, 0 if the carrier was built without it")
ddl_built = _capability("ddl_built", "whether the carrier was built with IBM's DDL")
ccl_built = _capability("ccl_built", "whether the carrier was built with oneCCL")
cuda_built = _capability("cuda_built", "whether the carrier was built with CUDA")
rocm_built = _capability("rocm_built", "whether the carrier was built with ROCm")


# -- process sets: subsets of the ranks that run collectives among themselves --------------------------------


class ProcessSet:
    """A subset of the ranks: register it by ``init(process_sets=[...])`` or ``add_process_set`` before use.

    ``process_set_id`` is None until then. Ranks in arguments, such as a broadcast's root, are always global.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet needs a list of ranks, but got {type(ranks_or_comm).__name__}; MPI "
                "communicators are not supported: list their ranks"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), but got {ranks!r}")
        self.ranks = sorted(ranks)

    def _members(self) -> list[int] | None:
        return None if self.process_set_id is None else carrier().process_set_ranks(self.process_set_id)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """Return this process's place within the set; None before it is registered."""
        members = self._members()
        if members is None:
            return None
        mine = carrier().launch.rank
        if mine not in members:
            raise ValueError(f"rank {mine} is not in process set {self.process_set_id} of ranks {members}")
        return members.index(mine)

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        if self.ranks is None:
            return None
        return carrier().launch.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
_added: weakref.WeakSet[ProcessSet] = weakref.WeakSet()


def registered_id(process_set: ProcessSet) -> int:
    """Return the id of `process_set`; ``ValueError`` if it is not registered."""
    if process_set.process_set_id is None:
        raise ValueError(
            f"process set {process_set} is not registered; pass it to init(process_sets=[...]) or "
            "add_process_set on every rank first"
        )
    return process_set.process_set_id


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a new process set; every rank must call this, with the same ranks and in the same order."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, size = process_set.ranks or [], carrier().launch.size
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"a process set needs distinct ranks from 0 to {size - 1}, but got {ranks}")
    set_id = carrier().add_process_set(ranks)
    if set_id is None:
        raise ValueError(f"a process set of ranks {ranks} exists already; use that one")
    process_set.process_set_id = set_id
    _added.add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set (all ranks must call); False for the global set and unregistered ones."""
    set_id = process_set.process_set_id
    if not set_id:
        return False
    process_set.process_set_id = None
    return carrier().remove_process_set(set_id)
