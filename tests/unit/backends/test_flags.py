"""The flags of parameters: counts of ranks that share one integer do not run into each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comm_core import DirectTransport, Engine, PythonTransport, RingTransport, local_channels
from commsched.backends.interface import Scaling, step_work
from commsched.optimizer.buckets import Buffers, Layout
from commsched.optimizer.round import DENSE, LATE, SPARSE
from scheduler.ir.actions import parse_actions
from scheduler.ir.buckets import one_per_layer
from scheduler.ir.program import data_parallel_program
from tests.support.engines import on_ranks, run_step


def flags(ranks: int) -> torch.Tensor:
    """Return the flags of a step's work."""
    program = data_parallel_program(
        "p", one_per_layer([4]), parse_actions("RS0 AG0"), 1, ranks, "gradients", False
    )
    return step_work(program, Buffers(Layout({}, [], {}), {}), 5, ranks, None, Scaling(), {}, {}).flags[0]


@pytest.mark.parametrize("ranks", [1, 2, 1023, 1024, 1025, 100_000])
def test_the_counts_of_many_ranks_are_told_apart(ranks: int) -> None:
    """1024 ranks with dense gradients once read as one with a sparse one."""
    total = flags(1)
    of_one_rank = torch.zeros_like(total)
    of_one_rank[:5] = torch.tensor([0, DENSE, SPARSE, DENSE + LATE, SPARSE + LATE])
    for _ in range(ranks):
        total += of_one_rank
    counts = [(flag % SPARSE, flag % LATE // SPARSE, flag // LATE) for flag in total[:5].tolist()]
    assert counts == [(0, 0, 0), (ranks, 0, 0), (0, ranks, 0), (ranks, 0, ranks), (0, ranks, ranks)]


class Collectives:
    """Stands for Horovod's operations between threads: every rank adds 3 ranks' values, which are its own."""

    rank, size = 0, 1

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        shard.copy_(full * 3)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        full.copy_(shard)

    def sum(self, full: torch.Tensor, name: str) -> None:
        full.mul_(3)


@pytest.mark.parametrize("plan", [[("AR", 0)], [("RS", 0), ("AG", 0)]], ids=["fused", "split"])
@pytest.mark.parametrize("kind", ["direct", "ring", "python"])
def test_engines_add_flags_without_rounding(kind: str, plan: list[tuple[str, int]]) -> None:
    """A sum in float32 or float64 would lose the dense count beside that of late gradients."""
    size = 1 if kind == "python" else 3
    channels = local_channels(size)
    value = 1000 * DENSE + 200_001 * SPARSE + 300_003 * LATE

    def one(rank: int) -> list[int]:
        make: Any = RingTransport if kind == "ring" else DirectTransport
        transport = PythonTransport(Collectives()) if kind == "python" else make(channels[rank], rank, size)
        engine = Engine(transport, rank, size)
        mine = flags(size)
        mine[:3] = torch.tensor([value, -value, DENSE])
        bucket = engine.add_bucket(mine, name="flags")
        engine.install([(op, bucket) for op, _ in plan])
        run_step(engine, [bucket])
        engine.close()
        return mine[:3].tolist()

    assert 3 * value > 1 << 53
    for sums in on_ranks(size, one):
        assert sums == [3 * value, -3 * value, 3 * DENSE]
