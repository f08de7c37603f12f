"""comm_core moves bytes: the engine that runs a plan of collectives without the GIL, and the fusion kernels.

It does not depend on schedules; `docs/engine.md` describes the way of a gradient through it. `CUDA_BUILT` is
True where the CUDA sources were compiled in.
"""

import torch  # noqa: F401  (loads the libraries that the extension is linked against)

from comm_core._C import (
    CUDA_BUILT,
    HOST_TIMEOUT,
    C10dChannel,
    Channel,
    DirectTransport,
    Hub,
    HubChannel,
    LinkGate,
    PythonTransport,
    RingTransport,
    TcpChannel,
    Traffic,
    Transport,
    abort_message,
    link_gate,
    pack,
)
from comm_core.engine import OPS, Engine, HubTransport
from comm_core.errors import EngineError
from comm_core.forks import close_in_children
from comm_core.tcp import Host, TcpConnection, tcp_channel, tcp_connections

__all__ = [
    "CUDA_BUILT",
    "HOST_TIMEOUT",
    "OPS",
    "C10dChannel",
    "Channel",
    "DirectTransport",
    "Engine",
    "EngineError",
    "Host",
    "Hub",
    "HubChannel",
    "HubTransport",
    "LinkGate",
    "PythonTransport",
    "RingTransport",
    "TcpChannel",
    "TcpConnection",
    "Traffic",
    "Transport",
    "abort_message",
    "close_in_children",
    "link_gate",
    "pack",
    "tcp_channel",
    "tcp_connections",
]
