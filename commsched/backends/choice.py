"""Which backend moves an optimizer's buckets: the engine on the CPU, or streams on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commsched.backends.cpu import engine_backend
from commsched.backends.interface import Backend
from commsched.collectives.process_sets import ProcessSet
from commsched.env import settings

# Two more names in the place of a transport: in-stream, also for CPU tensors; gradients one by one.
STREAM, PLAIN = "stream", "plain"


def wanted_transport(transport: str | Backend | None) -> str | None:
    """The transport asked for by argument or environment; None where a backend was given."""
    if isinstance(transport, Backend):
        return None
    return (transport or settings().transport or "").lower() or None


def backend_for(
    params: Sequence[torch.Tensor], transport: str | Backend | None, process_set: ProcessSet
) -> Backend:
    """The backend for where these parameters are; ``transport="stream"`` treats CPU tensors as a GPU's.

    A backend in the place of a transport is taken as it is: emulations bring their own. Collective.
    """
    if isinstance(transport, Backend):
        return transport
    device = params[0].device if params else torch.device("cpu")
    wanted = wanted_transport(transport)
    if device.type == "cpu" and wanted != STREAM:
        return engine_backend(process_set, transport)
    from commsched.backends.cuda import stream_backend

    return stream_backend(process_set, "auto" if wanted == STREAM else transport, device)
