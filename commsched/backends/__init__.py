"""What moves an optimizer's buckets between the ranks: one ``interface``, two implementations.

``cpu`` is the C++ engine and what it sends messages over, ``cuda`` streams over ``nccl``; ``ranks`` has the
small agreements among the ranks. ``backend_for`` chooses one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commsched.backends.cpu import engine_backend
from commsched.backends.interface import Backend
from commsched.collectives.job import ProcessSet
from commsched.env import settings

# Further values of `transport`: streams, also for CPU tensors; no buckets, each gradient reduced by itself.
STREAM, PLAIN = "stream", "plain"


def wanted_transport(transport: str | Backend | None) -> str | None:
    """Return the transport that the argument or the environment names; None for a backend."""
    if isinstance(transport, Backend):
        return None
    return (transport or settings().transport or "").lower() or None


def backend_for(
    params: Sequence[torch.Tensor],
    transport: str | Backend | None,
    process_set: ProcessSet,
    whole: bool = True,
) -> Backend:
    """Return the backend for the parameters' device. Collective.

    Without ``whole``, buckets may travel in blocks of int8 or fp8.
    ``transport="stream"`` uses streams for CPU tensors too. A backend passed as the transport is returned as
    it is, which emulations use.
    """
    if isinstance(transport, Backend):
        return transport
    device = params[0].device if params else torch.device("cpu")
    wanted = wanted_transport(transport)
    if device.type == "cpu" and wanted != STREAM:
        return engine_backend(process_set, transport, whole)
    from commsched.backends.cuda import stream_backend

    return stream_backend(process_set, "auto" if wanted == STREAM else transport, device)
