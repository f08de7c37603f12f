"""comm_core moves bytes: the engine that runs a plan without the GIL, and the fusion kernel of GPUs.

It does not depend on schedules; `docs/engine.md` describes the way of a gradient through it. `CUDA_BUILT` is
True where the CUDA sources were compiled in.
"""

import torch  # noqa: F401  (loads the libraries that the extension is linked against)

from comm_core._C import (
    CUDA_BUILT,
    Channel,
    DirectTransport,
    LinkGate,
    PendingMessages,
    PythonTransport,
    RingTransport,
    TcpChannel,
    Traffic,
    Transport,
    TwoTierTransport,
    alias_of,
    changed_rows,
    complete_late_by,
    foreign_users,
    foreign_uses,
    gradients_held,
    ignore_late,
    instances_of,
    link_gate,
    move_out,
    overlapping,
    quantise_blocks,
    set_late,
    set_warning,
    shares_storage,
    storage_holders,
    storages_held,
    sum_blocks,
    write_into,
)
from comm_core.boards import NotShared, open_boards, two_tier_transport
from comm_core.engine import OPS, Engine
from comm_core.errors import EngineError
from comm_core.forks import close_in_children
from comm_core.handshake import Waiting
from comm_core.messages import MessageChannel, local_message_channels, message_channel
from comm_core.tcp import (
    HOST_TIMEOUT,
    Host,
    TcpConnection,
    ask_store,
    in_store_thread,
    local_channels,
    tcp_channel,
    tcp_connections,
)

__all__ = [
    "CUDA_BUILT",
    "Channel",
    "DirectTransport",
    "Engine",
    "EngineError",
    "HOST_TIMEOUT",
    "Host",
    "LinkGate",
    "MessageChannel",
    "NotShared",
    "OPS",
    "PendingMessages",
    "PythonTransport",
    "RingTransport",
    "TcpChannel",
    "TcpConnection",
    "Traffic",
    "Transport",
    "TwoTierTransport",
    "Waiting",
    "alias_of",
    "ask_store",
    "changed_rows",
    "complete_late_by",
    "close_in_children",
    "foreign_users",
    "foreign_uses",
    "gradients_held",
    "ignore_late",
    "in_store_thread",
    "instances_of",
    "link_gate",
    "local_channels",
    "local_message_channels",
    "message_channel",
    "move_out",
    "open_boards",
    "overlapping",
    "quantise_blocks",
    "set_late",
    "set_warning",
    "shares_storage",
    "storage_holders",
    "storages_held",
    "sum_blocks",
    "tcp_channel",
    "tcp_connections",
    "two_tier_transport",
    "write_into",
]
