"""What communication costs the computation beside it, and the other way round, between emulated hosts.

python tests/native/bench_overlap.py --link 250mbit --transports tcp,tcp-ring

Every rank multiplies matrices on one thread while its engine reduces and gathers --buckets buckets that were
ready from the beginning. Each line, in milliseconds: the computation alone, the communication alone, both at
once until the later one ends, each one's own end then, and the processor time that communication added.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from links import cpu, parser, run

import comm_core


class Rank:
    """One rank's engine and its computation."""

    def __init__(self, transport: comm_core.Transport, arguments: argparse.Namespace) -> None:
        self.engine = comm_core.Engine(transport, transport.rank, transport.size, 60)
        count = int(arguments.megabytes * 1e6 / 4 / arguments.buckets) // transport.size * transport.size
        self.buffers = [torch.ones(count) for _ in range(arguments.buckets)]
        numbers = [self.engine.add_bucket(buffer, postscale=1 / transport.size) for buffer in self.buffers]
        # As a training step has it: all scattered, the first ones gathered in between.
        plan = [("RS", b) for b in numbers]
        for b in numbers:
            plan.insert(min(len(plan), plan.index(("RS", b)) + 4), ("AG", b))
        self.engine.install(plan)
        self.numbers = numbers
        self.matrix = torch.rand(512, 512)
        self.products = arguments.products
        self.tiny = torch.ones(transport.size)
        self.barrier = lambda: transport.all_reduce(self.tiny)

    def compute(self) -> None:
        for _ in range(self.products):
            self.matrix @ self.matrix

    def start(self) -> None:
        self.engine.begin_step()
        for bucket in self.numbers:
            self.engine.mark_ready(bucket)

    def both(self) -> tuple[float, float]:
        begin = time.monotonic()
        self.start()
        self.compute()
        computed = time.monotonic() - begin
        self.engine.wait_all()
        return computed, float(self.engine.events()["end"][-1]) - begin


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds."""
    begin, used = time.perf_counter(), cpu()
    call()
    return time.perf_counter() - begin, cpu() - used


def measure(transport: comm_core.Transport, arguments: argparse.Namespace) -> dict[str, float]:
    rank = Rank(transport, arguments)
    alone, communication, compute_ends, communication_ends, both, extra = ([] for _ in range(6))
    for _ in range(arguments.repeats):
        rank.barrier()
        seconds, used_alone = timed(rank.compute)
        alone.append(seconds)
        rank.barrier()
        begin = time.monotonic()
        rank.start()
        rank.engine.wait_all()
        communication.append(time.monotonic() - begin)
        rank.engine.events()
        rank.barrier()
        used = cpu()
        computed, communicated = rank.both()
        extra.append(cpu() - used - used_alone)
        compute_ends.append(computed)
        communication_ends.append(communicated)
        both.append(max(computed, communicated))
    columns = {
        "compute": alone,
        "communication": communication,
        "both": both,
        "compute_end": compute_ends,
        "communication_end": communication_ends,
        "cpu_added": extra,
    }
    return {name: 1e3 * statistics.median(values) for name, values in columns.items()}


if __name__ == "__main__":
    options = parser(__doc__, link="250mbit", transports="tcp,tcp-ring", megabytes=16.0)
    options.add_argument("--buckets", type=int, default=8)
    options.add_argument("--products", type=int, default=150)
    sys.exit(run(options.parse_args(), measure))
