"""Which machinery carries an optimizer's gradients: the engine on the CPU, or streams on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commsched.backends.cpu import Wire
from commsched.env import settings
from commsched.optimizer.layer_timing import Watch
from commsched.optimizer.planning import Planner
from commsched.optimizer.reducer import Flow
from commsched.optimizer.sharded_reducer import ShardedFlow

# Names in the place of a transport: in-stream, also for CPU tensors; and no plan at all.
STREAM, PLAIN = "stream", "plain"


@dataclass(frozen=True)
class Path:
    """What is made for one optimizer."""

    device: torch.device
    wire: Callable[..., Any]
    planner: Callable[..., Planner]
    flow: Callable[..., Flow]
    sharded: Callable[..., ShardedFlow]
    watch: Callable[[Any], Watch]


def wanted_transport(transport: Any) -> str | None:
    """The transport asked for, by argument or environment."""
    if isinstance(transport, Path):
        return None
    return (transport or settings().transport or "").lower() or None


def path_for(params: Sequence[torch.Tensor], transport: Any) -> Path:
    """Where these parameters live decides; ``transport="stream"`` takes CPU tensors the GPU's way too.

    A ``Path`` in the place of a transport is taken as it is: emulations bring their own.
    """
    if isinstance(transport, Path):
        return transport
    device = params[0].device if params else torch.device("cpu")
    wanted = wanted_transport(transport)
    if device.type == "cpu" and wanted != STREAM:
        return Path(device, Wire, Planner, Flow, ShardedFlow, lambda wire: Watch())
    from commsched.backends.cuda import DeviceWire
    from commsched.backends.cuda_planner import DevicePlanner
    from commsched.backends.cuda_reducer import DeviceFlow, DeviceShardedFlow
    from commsched.backends.cuda_timing import DeviceWatch

    def wire(process_set: Any, transport: str | None, *scales: Any) -> DeviceWire:
        flags_over = "auto" if wanted == STREAM else transport
        return DeviceWire(process_set, flags_over, device, *scales)

    return Path(
        device, wire, DevicePlanner, DeviceFlow, DeviceShardedFlow, lambda wire: DeviceWatch(wire.device)
    )
