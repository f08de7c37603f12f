"""What the benchmarks beside this file share: emulated hosts on which every transport is measured in turn."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import comm_core

Measure = Callable[[comm_core.Transport, argparse.Namespace], dict[str, float]]


def parser(description: str | None, link: str, transports: str, megabytes: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host")
    made.add_argument("--link", default=link)
    made.add_argument("--congestion", default="reno", help="congestion control of the hosts' TCP")
    made.add_argument("--transports", default=transports)
    made.add_argument("--megabytes", type=float, default=megabytes)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--segment-kb", type=int, default=256)
    made.add_argument("--depth", type=int, default=4)
    return made


def run(arguments: argparse.Namespace, measure: Measure) -> int:
    """Starts this program again on every host; there ``measure`` gives a transport's figures."""
    if "RANK" in os.environ:
        _as_rank(arguments, measure)
        return 0
    from dnn_bench.cluster import Cluster

    with Cluster(arguments.hosts, arguments.link, congestion=arguments.congestion, ssh=False) as cluster:
        ranks = [
            cluster.run(
                rank // arguments.per_host, [sys.executable, *sys.argv], own | {"OMP_NUM_THREADS": "1"}
            )
            for rank, own in enumerate(cluster.rank_variables(arguments.per_host))
        ]
        return max(process.wait(timeout=300) for process in ranks)


def _as_rank(arguments: argparse.Namespace, measure: Measure) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, rank == 0, timeout=timedelta(seconds=60))
    for name in arguments.transports.split(","):
        transport = _transport(name, dist.PrefixStore(name, store), rank, size, arguments)
        figures = {key: round(value, 2) for key, value in measure(transport, arguments).items()}
        if rank == 0:
            print(json.dumps({"transport": name, **figures}), flush=True)


def _transport(name: str, store: Any, rank: int, size: int, asked: argparse.Namespace) -> comm_core.Transport:
    channel = comm_core.tcp_channel(store, rank, size)
    if name == "tiers":
        return comm_core.two_tier_transport(channel, rank, [other // asked.per_host for other in range(size)])
    exchange = {"tcp": comm_core.DirectTransport, "tcp-ring": comm_core.RingTransport}[name]
    return exchange(channel, rank, size, segment_bytes=asked.segment_kb << 10, depth=asked.depth)


def cpu() -> float:
    """Processor seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
