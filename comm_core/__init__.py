"""comm_core moves bytes: the engine that runs a plan without the GIL, and the fusion kernel of GPUs.

It does not depend on schedules; `docs/engine.md` describes the way of a gradient through it. `CUDA_BUILT` is
True where the CUDA sources were compiled in.
"""

import torch  # noqa: F401  (loads the libraries that the extension is linked against)

from comm_core._C import (
    CUDA_BUILT,
    C10dChannel,
    Channel,
    DirectTransport,
    LinkGate,
    PythonTransport,
    RingTransport,
    TcpChannel,
    Traffic,
    Transport,
    abort_message,
    changed_rows,
    instances_of,
    link_gate,
    quantise_blocks,
    sum_blocks,
)
from comm_core.engine import OPS, Engine
from comm_core.errors import EngineError
from comm_core.forks import close_in_children
from comm_core.tcp import HOST_TIMEOUT, Host, TcpConnection, local_channels, tcp_channel, tcp_connections

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
    "LinkGate",
    "PythonTransport",
    "RingTransport",
    "TcpChannel",
    "TcpConnection",
    "Traffic",
    "Transport",
    "abort_message",
    "changed_rows",
    "close_in_children",
    "instances_of",
    "link_gate",
    "local_channels",
    "quantise_blocks",
    "sum_blocks",
    "tcp_channel",
    "tcp_connections",
]
