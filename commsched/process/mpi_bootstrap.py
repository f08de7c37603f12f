"""One broadcast over mpirun's MPI library, by which ranks on several hosts get the address of rank 0.

Used under mpirun where COMMSCHED_MASTER_ADDR is not set. MPI is finalised right after the broadcast, so that
no MPI thread and no busy wait remain, unless the script itself (mpi4py) had initialised it before.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from commsched.errors import CommError

_LIBRARIES = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")
_MPICH_COMM_WORLD, _MPICH_BYTE = 0x44000000, 0x4C00010D
_MESSAGE_BYTES = 1024


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise CommError(
        "the ranks need the address of rank 0, and no MPI library could be loaded to broadcast it (tried "
        f"{', '.join(_LIBRARIES)}); set COMMSCHED_MASTER_ADDR and COMMSCHED_MASTER_PORT (mpirun -x "
        "COMMSCHED_MASTER_ADDR=host -x COMMSCHED_MASTER_PORT=29511)"
    )


def _handles(mpi: ctypes.CDLL) -> tuple[object, object]:
    """Return MPI_COMM_WORLD and MPI_BYTE: addresses of objects in Open MPI, fixed integers in MPICH."""
    try:
        return tuple(
            ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))  # type: ignore[return-value]
            for name in ("ompi_mpi_comm_world", "ompi_mpi_byte")
        )
    except ValueError:
        return ctypes.c_int(_MPICH_COMM_WORLD), ctypes.c_int(_MPICH_BYTE)


def broadcast(value: dict[str, Any] | None, rank: int) -> dict[str, Any]:
    """Return rank 0's `value` on every rank of MPI_COMM_WORLD; each rank must call."""
    mpi = _library()
    initialized = ctypes.c_int(0)
    mpi.MPI_Initialized(ctypes.byref(initialized))
    if not initialized.value and mpi.MPI_Init(None, None) != 0:
        raise CommError(
            "MPI_Init failed; set COMMSCHED_MASTER_ADDR and COMMSCHED_MASTER_PORT to do without MPI"
        )
    buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if rank == 0:
        buffer.value = json.dumps(value).encode()
    world, byte = _handles(mpi)
    mpi.MPI_Bcast(buffer, ctypes.c_int(_MESSAGE_BYTES), byte, ctypes.c_int(0), world)
    if not initialized.value:
        mpi.MPI_Finalize()
    return json.loads(buffer.value)
