"""Measures how far gradients and parameters on their way slow the computation beside them.

On hosts whose processors also copy, sum and send, a replica computes more slowly while its RS and AG run. The
planner must know by how much: on two cores, this is more than what the link itself costs.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from commsched.pipeline.fabric import Fabric, Lane
from commsched.pipeline.reduction import Scattered
from commsched.pipeline.versions import Version
from scheduler.ir.link import Link

_MOST_BYTES, _SECONDS, _REPEAT = 8 << 20, 0.05, 7
_SIDE = 192  # of the matrices that stand for the model's computation


def traffic_cost(fabric: Fabric, link: Link) -> float:
    """Seconds that this rank cannot compute for each byte that it sends in RS and AG; every rank calls.

    ``link``: as measured, so that what is sent stays small enough to be hidden under the computation.
    """
    bytes_ = min(_MOST_BYTES, int(_SECONDS / link.beta) if link.beta else _MOST_BYTES)
    load = _Load(fabric, max(bytes_, 1 << 12) // 4)
    enough = 2 * (fabric.size * link.alpha + 4 * load.elements * link.beta) + 0.01
    rounds = max(1, round(enough / min(_computed(8) for _ in range(3)) * 8))
    differences = []
    try:
        for period in range(_REPEAT):
            load.meet()
            start = time.perf_counter()
            _computed(2 * rounds)
            alone = time.perf_counter() - start
            load.meet()
            differences.append(load.beside(period, rounds) - alone)
    finally:
        load.scattered.close()
    sent = 2 * (fabric.size - 1) / fabric.size * 4 * load.elements
    return max(0.0, statistics.median(differences)) / sent


class _Load:
    """A stage of one parameter with a replica on every rank."""

    def __init__(self, fabric: Fabric, elements: int) -> None:
        self.lane: Lane = fabric.lane("traffic")
        self.rank, self.size, self.elements = fabric.rank, fabric.size, elements
        self.leaf, self.grad = nn.Parameter(torch.zeros(elements)), torch.zeros(elements)
        everyone = list(range(fabric.size))
        self.scattered = Scattered(
            fabric.transport("traffic", everyone),
            fabric.rank,
            fabric.size,
            fabric.timeout,
            [[(0, 0, elements)]],
            [self.leaf.data],
            [("RS", 0), ("AG", 0)],
        )

    def meet(self) -> None:
        """Returns once every rank is here."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        here = [self.lane.send(peer, [torch.zeros(1)]) for peer in peers]
        here += [self.lane.receive(peer, [torch.empty(1)]) for peer in peers]
        for pending in here:
            pending.wait()

    def beside(self, period: int, rounds: int) -> float:
        """Seconds of twice so many rounds, the first beside RS and the second beside AG."""
        start = time.perf_counter()
        self.scattered.ready(period, 0, [self.grad], [self.leaf])
        self.scattered.complete([self.grad])
        _computed(rounds)
        self.scattered.wait_reduced()
        self.scattered.updated(0)
        _computed(rounds)
        self.scattered.take_in(Version(period, [self.leaf]), 0)
        return time.perf_counter() - start


def _computed(rounds: int) -> float:
    """Computes something; the seconds it took."""
    one = torch.ones(_SIDE, _SIDE)
    start = time.perf_counter()
    for _ in range(rounds):
        one @ one
    return time.perf_counter() - start
