"""Makes commsched and Accelerate see the same ranks, whichever launcher started the script."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from commsched.collectives.current_carrier import carrier
from commsched.collectives.initialization import init, size
from commsched.collectives.objects import broadcast_object
from commsched.errors import CommError


@contextmanager
def joined() -> Iterator[None]:
    """Join the job. Within this context Accelerate finds the ranks of any launcher.

    Accelerate reads torchrun's variables. Under another launcher they are set here, and removed again because
    ``init()`` refuses the variables of two launchers.
    """
    init()
    if size() == 1 or distributed.is_initialized() or carrier().launch.launcher == "torchrun":
        yield
        return
    variables = _torchrun_variables()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _torchrun_variables() -> dict[str, str]:
    launch = carrier().launch
    with socket.socket() as free:
        free.bind(("", 0))
        address, port = broadcast_object((carrier().meeting.address, free.getsockname()[1]), 0)
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def check_ranks(processes: int) -> None:
    """Raise unless Accelerate has found as many processes as commsched."""
    if processes != size():
        raise CommError(
            f"Accelerate runs {processes} processes and commsched {size()}; start the script with torchrun,"
            " accelerate launch or horovodrun, and set no launcher's variables yourself"
        )
