"""Ranks as threads: several rounds in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import comm_core
from commsched.backends.cpu import EngineBackend
from commsched.backends.interface import Scaling
from commsched.backends.ranks import Ranks
from commsched.optimizer.buckets import Buffers
from commsched.optimizer.gradient import Residuals
from commsched.optimizer.hooks import Hooks, owners
from commsched.optimizer.planner import Model, Plan
from commsched.optimizer.round import Round
from commsched.optimizer.whole_step import WholeStep
from scheduler.ir.link import Link
from scheduler.policies import plan
from tests.support import thread_ranks

Channels = Sequence[comm_core.TcpChannel]


def local_backend(channels: Channels, rank: int, timeout: float = 200.0) -> EngineBackend:
    """The engine over a channel between threads; nothing of the runtime is needed."""
    size = len(channels)
    process_set: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size, ranks=None)
    transport = comm_core.DirectTransport(channels[rank], rank, size)
    transport.set_timeout(timeout)
    return EngineBackend(Ranks(process_set), "threads", transport, timeout)


def round_of(
    model: nn.Module, backend: EngineBackend, policy: str = "dear", bucket_bytes: int = 2000
) -> tuple[Round, Hooks]:
    """Return a round of a model's gradients, planned for made-up times, and its hooks."""
    named = list(model.named_parameters())
    params, names = [p for _, p in named], tuple(name for name, _ in named)
    facts = Model.of(params, names)
    link, order, size = Link(alpha=1e-4, beta=1e-8), list(range(len(params))), backend.ranks.size
    profile = facts.guess(order, link)
    program = plan(profile, link, policy, ranks=size, bucket_bytes=bucket_bytes)
    chosen = Plan(program, profile, link, (-1, *order))
    layout = facts.layout(chosen.buckets(facts), size)
    nothing = Residuals({}, 0, backend.ranks, 1.0, False, dict)
    now = Round(params, names, backend, WholeStep(backend), Scaling(after=1.0 / size), nothing)
    kinds = {group: (facts.kind(group), torch.device("cpu")) for group in layout.lengths}
    now.install(program, Buffers(layout, kinds))
    return now, Hooks(now, owners(params, model))


def run_threads(
    size: int,
    body: Callable[[int, Channels], Any],
    timeout: float = 400.0,
    failed: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the results of ``body(rank, channels)``, on a thread each; raise the first exception of any."""
    channels = comm_core.local_channels(size)
    return thread_ranks.run_threads(size, lambda rank: body(rank, channels), timeout, failed)


def mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Summed in rank order, then scaled, as the direct exchange does it."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total * (1.0 / len(tensors))
