"""``init()`` to ``shutdown()`` and the questions in between: rank, size, what is built in."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commsched.collectives import current_carrier as state
from commsched.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    forget_process_sets,
    global_process_set,
)
from commsched.env import settings
from commsched.process.launch import Launch, detect_launch

if TYPE_CHECKING:
    from commsched.collectives.carrier import Built, Engine


_initialised_by = 0


def _wanted_engine(launch: Launch) -> str:
    """The engine's name: as COMMSCHED_RUNTIME says, else Horovod's own where horovodrun started us and it is
    there."""
    if settings().runtime:
        return settings().runtime
    horovod = launch.launcher == "horovodrun" and importlib.util.find_spec("horovod") is not None
    return "horovod" if horovod else "torch"


def _engine_class(launch: Launch) -> type[Engine]:
    if _wanted_engine(launch) == "horovod":
        from commsched.collectives.horovod_carrier import HorovodEngine

        return HorovodEngine
    from commsched.collectives.torch_carrier.carrier import TorchEngine

    return TorchEngine


def _launch() -> Launch:
    settings.cache_clear()
    return detect_launch(os.environ, settings().launcher)


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job: find the other ranks and connect to them. Calling it again does nothing.

    Works alike under horovodrun, torchrun, mpirun and alone (one rank). `process_sets` registers subsets at
    once, the string ``"dynamic"`` is accepted as in Horovod (they can always be added later here). `comm` may
    only name all ranks: use process sets for less.
    """
    if state.current() is not None:
        return
    launch = _launch()
    if comm is not None and list(comm) not in ([], list(range(launch.size))):
        raise ValueError(
            f"init(comm=...) must name all {launch.size} ranks, but got {comm!r}; for a subset of the ranks "
            "use init(process_sets=[ProcessSet(ranks)])"
        )
    global _initialised_by
    _initialised_by = os.getpid()
    state.install(_engine_class(launch)(launch))  # type: ignore[call-arg]
    global_process_set.ranks = list(range(launch.size))
    try:
        _register(process_sets)
    except Exception:
        shutdown()
        raise


def _register(process_sets: Sequence[ProcessSet] | str | None) -> None:
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"process_sets must be a list of ProcessSet or 'dynamic', but is {process_sets!r}"
            )
        return
    for process_set in process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the job; ``init()`` may follow. Operations of other ranks that still need this one end with
    CommError."""
    engine = state.current()
    if engine is None:
        return
    data = sys.modules.get("commsched.collectives.private_groups")
    if data is not None:  # else nobody has made a group
        data.release_groups()
    state.install(None)
    forget_process_sets()
    engine.shutdown()


@atexit.register
def _leave_at_exit() -> None:
    """Not in a forked child, whose end must not end its parent's part in the job."""
    if os.getpid() == _initialised_by:
        shutdown()


def is_initialized() -> bool:
    """Whether ``init()`` was called (and ``shutdown()`` not yet)."""
    return state.current() is not None


def rank() -> int:
    """This process's number in the job, from 0."""
    return state.engine().launch.rank


def size() -> int:
    """How many processes the job has."""
    return state.engine().launch.size


def local_rank() -> int:
    """This process's number on its host, from 0; the usual choice of GPU."""
    return state.engine().launch.local_rank


def local_size() -> int:
    """How many of the job's processes run on this host."""
    return state.engine().launch.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank."""
    return state.engine().cross[0]


def cross_size() -> int:
    """How many hosts have a process of this local rank."""
    return state.engine().cross[1]


def engine_name() -> str:
    """Which engine carries the collectives: ``"horovod"`` or ``"torch"``."""
    return state.engine().name


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record every operation in `file_path` on rank 0 (open it in chrome://tracing)."""
    state.engine().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording that ``start_timeline`` began."""
    state.engine().stop_timeline()


def _built() -> Built:
    engine = state.current()
    return (type(engine) if engine is not None else _engine_class(_launch())).built()


def mpi_threads_supported() -> bool:
    """Whether MPI, where it carries the collectives, may be called from several threads."""
    return state.engine().mpi_threads_supported()


def mpi_enabled() -> bool:
    """Whether MPI carries the collectives."""
    return _built().mpi_enabled


def mpi_built() -> bool:
    """Whether the engine was built with MPI."""
    return _built().mpi_built


def gloo_enabled() -> bool:
    """Whether gloo carries the collectives."""
    return _built().gloo_enabled


def gloo_built() -> bool:
    """Whether the engine was built with gloo."""
    return _built().gloo_built


def nccl_built() -> int:
    """NCCL's version as one integer where the engine was built with it, else 0."""
    return _built().nccl_built


def ddl_built() -> bool:
    """Whether the engine was built with IBM's DDL."""
    return _built().ddl_built


def ccl_built() -> bool:
    """Whether the engine was built with oneCCL."""
    return _built().ccl_built


def cuda_built() -> bool:
    """Whether the engine was built with CUDA."""
    return _built().cuda_built


def rocm_built() -> bool:
    """Whether the engine was built with ROCm."""
    return _built().rocm_built
