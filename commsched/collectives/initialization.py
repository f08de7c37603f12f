"""``init()``, ``shutdown()`` and Horovod's functions that describe the job: rank, size, what is built in."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from commsched.collectives.current_carrier import carrier, carrier_or_none, set_carrier
from commsched.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    forget_process_sets,
    global_process_set,
)
from commsched.env import settings
from commsched.process.launch import Launch, detect_launch

if TYPE_CHECKING:
    from commsched.collectives.carrier import Built, Carrier
    from commsched.process.rendezvous import Publish


_initialised_by = 0


def _carrier_class(launch: Launch) -> type[Carrier]:
    """Return the carrier that COMMSCHED_RUNTIME names; by default Horovod under horovodrun, else torch."""
    name = settings().runtime
    if not name:
        horovod = launch.launcher == "horovodrun" and importlib.util.find_spec("horovod") is not None
        name = "horovod" if horovod else "torch"
    if name == "horovod":
        from commsched.collectives.horovod_carrier import HorovodCarrier

        return HorovodCarrier
    from commsched.collectives.torch_carrier.carrier import TorchCarrier

    return TorchCarrier


def _launch() -> Launch:
    settings.cache_clear()  # the environment may have changed since an earlier init()
    return detect_launch(os.environ, settings().launcher)


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job: find the other ranks and connect to them. Calling it again does nothing.

    Works under horovodrun, torchrun, mpirun, Slurm's srun, Ray Train and alone (one rank). `process_sets` are
    registered at once; they can always be added later, so Horovod's ``"dynamic"`` changes nothing. `comm` may
    only name all ranks: use process sets for fewer.
    """
    if carrier_or_none() is not None:
        return
    launch = _launch()
    if comm is not None and list(comm) not in ([], list(range(launch.size))):
        raise ValueError(
            f"init(comm=...) must name all {launch.size} ranks, but got {comm!r}; for a subset of the ranks "
            "use init(process_sets=[ProcessSet(ranks)])"
        )
    _enter(_carrier_class(launch)(launch))  # type: ignore[call-arg]
    try:
        _register(process_sets)
    except Exception:
        shutdown()
        raise


def join_framework(launch: Launch, publish: Publish) -> None:
    """Join a job whose ranks a framework has started and connected: ``publish`` broadcasts rank 0's value."""
    from commsched.collectives.torch_carrier.carrier import TorchCarrier

    settings.cache_clear()
    _enter(TorchCarrier(launch, publish))


def _enter(joined: Carrier) -> None:
    global _initialised_by
    _initialised_by = os.getpid()
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
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the job; ``init()`` may follow. Other ranks' operations with this rank raise ``CommError``."""
    leaving = carrier_or_none()
    if leaving is None:
        return
    private_groups = sys.modules.get("commsched.collectives.private_groups")
    if private_groups is not None:  # None: no group was made
        private_groups.release_groups()
    set_carrier(None)
    forget_process_sets()
    leaving.shutdown()


@atexit.register
def _leave_at_exit() -> None:
    """Leave the job, but not in a forked child: its parent stays."""
    if os.getpid() == _initialised_by:
        shutdown()


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
