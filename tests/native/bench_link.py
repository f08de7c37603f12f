"""Time and processor time of reduce-scatter and all-gather between emulated hosts.

python tests/native/bench_link.py --hosts 2 --link 1gbit --transports tcp,tcp-ring
python tests/native/bench_link.py --hosts 1 --per-host 4 --link unlimited --transports tcp,tiers

Each line: milliseconds for RS and for AG of --megabytes (the median of --repeats), processor milliseconds
that one rank's process spent on one RS + AG, and milliseconds for RS of 4 KB. Results are checked before
they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from links import cpu, parser, run

import comm_core


def check(transport: comm_core.Transport, rank: int, size: int) -> None:
    values = torch.arange(size * 100_003, dtype=torch.float32) % 1001
    mine = values + rank
    transport.all_reduce(mine, postscale=1 / size)
    torch.testing.assert_close(mine, values + (size - 1) / 2)


def timed(call: Any, repeats: int, barrier: Any) -> float:
    times = []
    for _ in range(repeats):
        barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def measure(transport: comm_core.Transport, arguments: argparse.Namespace) -> dict[str, float]:
    size, repeats = transport.size, arguments.repeats
    check(transport, transport.rank, size)
    count = int(arguments.megabytes * 1e6 / 4) // size * size
    big = transport.zeros(count, torch.float32).fill_(1)  # as the buckets of an optimizer
    small, tiny = torch.ones(1024 * size), torch.ones(size)

    def barrier() -> None:
        transport.all_reduce(tiny)

    def both() -> None:
        transport.reduce_scatter(big)
        transport.all_gather(big)

    both()
    begin = cpu()
    for _ in range(repeats):
        both()
    used = 1e3 * (cpu() - begin) / repeats
    return {
        "rs_ms": timed(lambda: transport.reduce_scatter(big), repeats, barrier),
        "ag_ms": timed(lambda: transport.all_gather(big), repeats, barrier),
        "both_ms": timed(both, repeats, barrier),
        "cpu_ms": used,
        "small_ms": timed(lambda: transport.reduce_scatter(small), 50, barrier),
    }


if __name__ == "__main__":
    arguments = parser(__doc__, link="1gbit", transports="tcp,tcp-ring", megabytes=33.5).parse_args()
    sys.exit(run(arguments, measure))
