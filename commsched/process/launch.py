"""Who started this process, and as which rank of how many: read from the launchers' environment variables.

Pure (a mapping in, a record out) and free of torch, so that the command line can use it too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commsched.errors import CommError

LAUNCHERS = ("horovodrun", "torchrun", "mpirun")


@dataclass(frozen=True)
class Launch:
    """This process's place in its job. `node` names its host; equal names mean the same host."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    mpi: bool = False

    @property
    def one_host(self) -> bool:
        """True where the launcher says that every rank runs on this host."""
        return self.local_size == self.size


ALONE = Launch("none", 0, 1, 0, 1, "localhost")


class _Reader:
    """Integers out of one launcher's variables, with messages that say which launcher's and what is wrong."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ, self.launcher = environ, launcher

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            text = self.environ.get(name, "")
            if text:
                break
        else:
            if default is not None:
                return default
            raise CommError(
                f"this process looks started by {self.launcher}, but {' or '.join(names)} is not set; start "
                f"it again with {self.launcher}, or set COMMSCHED_LAUNCHER=none to run it alone"
            )
        try:
            return int(text)
        except ValueError:
            raise CommError(f"{name} (set by {self.launcher}) must be an integer, but is {text!r}") from None


def _horovodrun(environ: Mapping[str, str]) -> Launch:
    if "HOROVOD_RANK" not in environ and "HOROVOD_SIZE" not in environ:
        return _mpi(environ, "horovodrun")
    read = _Reader(environ, "horovodrun")
    return Launch(
        "horovodrun",
        read.integer("HOROVOD_RANK"),
        read.integer("HOROVOD_SIZE"),
        read.integer("HOROVOD_LOCAL_RANK"),
        read.integer("HOROVOD_LOCAL_SIZE"),
        environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
    )


def _torchrun(environ: Mapping[str, str]) -> Launch:
    read = _Reader(environ, "torchrun")
    rank, size = read.integer("RANK"), read.integer("WORLD_SIZE")
    # RANK and WORLD_SIZE set by hand (env:// without torchrun) tell nothing about hosts: one rank per process
    # then.
    local_rank = read.integer("LOCAL_RANK", default=rank)
    local_size = read.integer("LOCAL_WORLD_SIZE", default=size)
    return Launch(
        "torchrun", rank, size, local_rank, local_size, environ.get("GROUP_RANK") or socket.gethostname()
    )


def _mpi(environ: Mapping[str, str], launcher: str = "mpirun") -> Launch:
    read = _Reader(environ, launcher)
    rank = read.integer("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    size = read.integer("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return Launch(
        launcher,
        rank,
        size,
        read.integer("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", default=rank),
        read.integer("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=size),
        environ.get("PMIX_HOSTNAME") or socket.gethostname(),
        mpi=True,
    )


_READERS: dict[str, Callable[[Mapping[str, str]], Launch]] = {
    "horovodrun": _horovodrun,
    "torchrun": _torchrun,
    "mpirun": _mpi,
}
_MARKS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
}


def _horovodrun_over_mpi(environ: Mapping[str, str]) -> bool:
    """True where the mpirun that started this process was itself called by horovodrun.

    horovodrun hands over to Open MPI without setting a variable of its own, but always with these three
    options.
    """
    return (
        environ.get("OMPI_MCA_orte_tag_output") == "1"
        and environ.get("OMPI_MCA_pml") == "ob1"
        and environ.get("OMPI_MCA_btl") == "^openib"
    )


def _found(environ: Mapping[str, str]) -> dict[str, str]:
    """The launchers whose variables are set, each with the first variable that gave it away."""
    found = {
        launcher: next(name for name in names if name in environ)
        for launcher, names in _MARKS.items()
        if any(name in environ for name in names)
    }
    if "mpirun" in found and "horovodrun" not in found and _horovodrun_over_mpi(environ):
        return {"horovodrun" if name == "mpirun" else name: variable for name, variable in found.items()}
    return found


def detect_launch(environ: Mapping[str, str], wanted: str = "") -> Launch:
    """The launch that `environ` describes; `wanted` (COMMSCHED_LAUNCHER) decides where it describes
    several."""
    found = _found(environ)
    if wanted == "none" or (not wanted and not found):
        return ALONE
    if not wanted and len(found) > 1:
        seen = " and ".join(f"{launcher} ({variable})" for launcher, variable in found.items())
        raise CommError(
            f"the variables of several launchers are set at once: {seen}; start the script with one of them "
            "only, or name the one that counts with COMMSCHED_LAUNCHER=" + "|".join(found)
        )
    launch = _READERS[wanted or next(iter(found))](environ)
    _check(launch)
    return launch


def _check(launch: Launch) -> None:
    for what, index, count in (
        ("rank", launch.rank, launch.size),
        ("local rank", launch.local_rank, launch.local_size),
    ):
        if not 0 <= index < count:
            raise CommError(
                f"{launch.launcher} gave {what} {index} of {count}: it must be at least 0 and below {count}; "
                "are variables of another job left in the environment?"
            )
