"""Reads launcher, rank and number of ranks from the environment variables that launchers set.

Does not import torch, so that the command line starts fast.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commsched.errors import CommError
from commsched.process import slurm


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
    address: str = ""  # of rank 0, with `port`, where the launcher's variables tell both
    port: int = 0
    elastic: bool = False  # horovodrun's driver tells each process its place anew: see rendezvous.renew

    @property
    def one_host(self) -> bool:
        """Whether every rank runs on this host, as far as the launcher says."""
        return self.local_size == self.size


ALONE = Launch("none", 0, 1, 0, 1, "localhost")


class _Variables(NamedTuple):
    """One launcher's variables. Of several names for a value, the first one that is set counts."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node: str


_VARIABLES = {
    "horovodrun": _Variables(
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        "HOROVOD_HOSTNAME",
    ),
    "torchrun": _Variables(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), "GROUP_RANK"),
    "mpirun": _Variables(
        ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        "PMIX_HOSTNAME",
    ),
}


def _read(environ: Mapping[str, str], launcher: str) -> Launch:
    """Return the launch that the variables of `launcher` describe; errors name it."""

    def integer(names: tuple[str, ...], default: int | None = None) -> int:
        name = next((name for name in names if environ.get(name)), None)
        if name is None and default is not None:
            return default
        if name is None:
            raise CommError(
                f"{' or '.join(names)} is not set, but other variables of {launcher} are; start this "
                f"process again with {launcher}, or set COMMSCHED_LAUNCHER=none to run it alone"
            )
        try:
            return int(environ[name])
        except ValueError:
            raise CommError(
                f"{name} (set by {launcher}) must be an integer, but is {environ[name]!r}"
            ) from None

    variables = _VARIABLES[launcher]
    mpi = launcher == "mpirun"
    if launcher == "horovodrun" and "HOROVOD_RANK" not in environ and "HOROVOD_SIZE" not in environ:
        variables, mpi = _VARIABLES["mpirun"], True  # horovodrun called mpirun
    rank, size = integer(variables.rank), integer(variables.size)
    # Without local ranks, as with RANK and WORLD_SIZE set by hand for env://, assume one host. Kubernetes'
    # PyTorchJob sets only these two, once for each pod.
    in_pod = launcher == "torchrun" and "KUBERNETES_SERVICE_HOST" in environ
    place: tuple[int | None, int | None] = (0, 1) if in_pod else (rank, size)
    if variables is _VARIABLES["horovodrun"]:
        place = None, None
    local_rank = integer(variables.local_rank, place[0])
    local_size = integer(variables.local_size, place[1])
    node = environ.get(variables.node) or socket.gethostname()
    elastic = launcher == "horovodrun" and not mpi and environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")
    return Launch(launcher, rank, size, local_rank, local_size, node, mpi, elastic=elastic)


def _read_slurm(environ: Mapping[str, str]) -> Launch:
    size, local_size = slurm.sizes(environ)
    address, port = slurm.meeting_place(environ) if size > 1 else ("", 0)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    rank, local_rank = (slurm.number(environ, name) for name in (slurm.RANK, "SLURM_LOCALID"))
    return Launch("slurm", rank, size, local_rank, local_size, node, address=address, port=port)


def _launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launchers whose variables are set, each with the first such variable.

    Slurm's count last: torchrun, mpirun and Ray run inside Slurm's jobs and pass its variables on. `srun` may
    set PMI's variables besides its own; they then say the same.
    """
    found = {
        launcher: next(name for name in variables.rank + variables.size if name in environ)
        for launcher, variables in _VARIABLES.items()
        if any(name in environ for name in variables.rank + variables.size)
    }
    # Over MPI, horovodrun sets no variable of its own, but always passes these three options to Open MPI.
    options = {"orte_tag_output": "1", "pml": "ob1", "btl": "^openib"}
    by_horovodrun = all(environ.get(f"OMPI_MCA_{name}") == value for name, value in options.items())
    if "mpirun" in found and "horovodrun" not in found and by_horovodrun:
        return {"horovodrun" if name == "mpirun" else name: variable for name, variable in found.items()}
    if slurm.in_step(environ):
        pmi = (environ.get("PMI_RANK"), environ.get("PMI_SIZE"))
        if found.get("mpirun") == "PMI_RANK" and pmi == (environ[slurm.RANK], str(slurm.sizes(environ)[0])):
            del found["mpirun"]
        if found.get("torchrun") == "WORLD_SIZE":  # often exported in batch scripts
            del found["torchrun"]
        if not found:
            return {"slurm": slurm.RANK}
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
    launcher = wanted or next(iter(found))
    launch = _read_slurm(environ) if launcher == "slurm" else _read(environ, launcher)
    _check(launch)
    return launch


def by_host(nodes: Sequence[str]) -> str:
    """Draw the ranks of each host; `nodes` has each rank's."""
    ranks_of = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in nodes}
    return ", ".join(f"host {node} [{' '.join(map(str, ranks))}]" for node, ranks in ranks_of.items())


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
