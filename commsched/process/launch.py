"""Reads launcher, rank and number of ranks from the environment variables that launchers set.

Does not import torch, so that the command line starts fast.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commsched.errors import CommError

LAUNCHERS = ("horovodrun", "torchrun", "mpirun")


@dataclass(frozen=True)
class Launch:
    """This process's rank in its job. Ranks with the same `node` run on the same host."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    mpi: bool = False

    @property
    def one_host(self) -> bool:
        """Whether every rank runs on this host, as far as the launcher says."""
        return self.local_size == self.size


ALONE = Launch("none", 0, 1, 0, 1, "localhost")


class _Variables:
    """The environment variables of one launcher; errors name it."""

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
                f"{' or '.join(names)} is not set, but other variables of {self.launcher} are; start this "
                f"process again with {self.launcher}, or set COMMSCHED_LAUNCHER=none to run it alone"
            )
        try:
            return int(text)
        except ValueError:
            raise CommError(f"{name} (set by {self.launcher}) must be an integer, but is {text!r}") from None


def _horovodrun(environ: Mapping[str, str]) -> Launch:
    if "HOROVOD_RANK" not in environ and "HOROVOD_SIZE" not in environ:
        return _mpi(environ, "horovodrun")
    variables = _Variables(environ, "horovodrun")
    return Launch(
        "horovodrun",
        variables.integer("HOROVOD_RANK"),
        variables.integer("HOROVOD_SIZE"),
        variables.integer("HOROVOD_LOCAL_RANK"),
        variables.integer("HOROVOD_LOCAL_SIZE"),
        environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
    )


def _torchrun(environ: Mapping[str, str]) -> Launch:
    variables = _Variables(environ, "torchrun")
    rank, size = variables.integer("RANK"), variables.integer("WORLD_SIZE")
    # Where RANK and WORLD_SIZE are set by hand (env:// without torchrun), assume one host.
    local_rank = variables.integer("LOCAL_RANK", default=rank)
    local_size = variables.integer("LOCAL_WORLD_SIZE", default=size)
    return Launch(
        "torchrun", rank, size, local_rank, local_size, environ.get("GROUP_RANK") or socket.gethostname()
    )


def _mpi(environ: Mapping[str, str], launcher: str = "mpirun") -> Launch:
    variables = _Variables(environ, launcher)
    rank = variables.integer("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    size = variables.integer("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return Launch(
        launcher,
        rank,
        size,
        variables.integer("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", default=rank),
        variables.integer("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=size),
        environ.get("PMIX_HOSTNAME") or socket.gethostname(),
        mpi=True,
    )


_READERS: dict[str, Callable[[Mapping[str, str]], Launch]] = {
    "horovodrun": _horovodrun,
    "torchrun": _torchrun,
    "mpirun": _mpi,
}
# A launcher started this process if one of these is set.
_EVIDENCE = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
}


def _horovodrun_over_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether horovodrun called the mpirun that started this process.

    It sets no variable of its own then, but always passes these three options to Open MPI.
    """
    return (
        environ.get("OMPI_MCA_orte_tag_output") == "1"
        and environ.get("OMPI_MCA_pml") == "ob1"
        and environ.get("OMPI_MCA_btl") == "^openib"
    )


def _launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launchers whose variables are set, each with the first such variable."""
    found = {
        launcher: next(name for name in names if name in environ)
        for launcher, names in _EVIDENCE.items()
        if any(name in environ for name in names)
    }
    if "mpirun" in found and "horovodrun" not in found and _horovodrun_over_mpi(environ):
        return {"horovodrun" if name == "mpirun" else name: variable for name, variable in found.items()}
    return found


def detect_launch(environ: Mapping[str, str], wanted: str = "") -> Launch:
    """Return the launch that `environ` describes; `wanted` (COMMSCHED_LAUNCHER) chooses among several."""
    found = _launchers(environ)
    if wanted == "none" or (not wanted and not found):
        return ALONE
    if not wanted and len(found) > 1:
        seen = " and ".join(f"{launcher} ({variable})" for launcher, variable in found.items())
        raise CommError(
            f"the variables of several launchers are set at once: {seen}; start the script with one of them "
            "only, or choose one with COMMSCHED_LAUNCHER=" + "|".join(found)
        )
    launch = _READERS[wanted or next(iter(found))](environ)
    _check(launch)
    return launch


def _check(launch: Launch) -> None:
    for name, index, count in (
        ("rank", launch.rank, launch.size),
        ("local rank", launch.local_rank, launch.local_size),
    ):
        if not 0 <= index < count:
            raise CommError(
                f"{launch.launcher} gave {name} {index} of {count}: it must be at least 0 and below {count}; "
                "are variables of another job left in the environment?"
            )
