"""Ranks as threads: a ``Wire`` over the in-process hub, for several flows in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import comm_core
from commsched.backends.cpu import Wire
from commsched.optimizer.bucket_layout import Buffers, build_layout
from commsched.optimizer.hooks import Hooks
from commsched.optimizer.model_layers import Model
from commsched.optimizer.planning import Plan
from commsched.optimizer.reducer import Flow
from scheduler.ir.link import Link
from scheduler.policies import plan
from tests.support import threads


class HubWire(Wire):
    """The engine over a hub; nothing of the runtime is needed."""

    def __init__(self, hub: comm_core.Hub, rank: int, sums: bool = False, timeout: float = 200.0) -> None:
        self.rank, self.size, self._root, self._outside = rank, hub.size, 0, 0
        self.prescale, self.postscale, self.wire_dtype = 1.0, 1.0 if sums else 1.0 / hub.size, None
        self.timeout, self.transport_name = timeout, "hub"
        self.transport = comm_core.HubTransport(hub, rank)
        self.transport.set_timeout(timeout)
        self.engine = comm_core.Engine(self.transport, rank, hub.size, timeout)


def flow_of(
    model: nn.Module, wire: Wire, policy: str = "dear", bucket_bytes: int = 2000
) -> tuple[Flow, Hooks]:
    """A flow over a model's parameters, planned for made-up times, and its hooks."""
    named = list(model.named_parameters())
    params, names = [p for _, p in named], tuple(name for name, _ in named)
    facts = Model(names, tuple(p.numel() for p in params), tuple(p.dtype for p in params))
    link, order = Link(alpha=1e-4, beta=1e-8), list(range(len(params)))
    profile = facts.guess(order, link)
    program = plan(profile, link, policy, ranks=wire.size, bucket_bytes=bucket_bytes)
    chosen = Plan(program, profile, link, (-1, *order))
    layout = build_layout(facts.numels, facts.itemsizes, chosen.buckets(facts.itemsizes), wire.size)
    flow = Flow(params, names, wire, wire.postscale == 1.0)
    flow.install(program, Buffers(layout, {g: (facts.kind(g), torch.device("cpu")) for g in layout.lengths}))
    return flow, Hooks(flow, model)


def run_threads(size: int, body: Callable[[int, comm_core.Hub], Any], timeout: float = 400.0) -> list[Any]:
    """``body(rank, hub)`` on one thread for each rank; its results, or the first exception of any."""
    hub = comm_core.Hub(size)
    return threads.run_threads(size, lambda rank: body(rank, hub), timeout)


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Summed in rank order, then scaled, as the direct exchange does it."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total * (1.0 / len(tensors))
