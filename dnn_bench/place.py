"""The options that say where ranks run: on emulated hosts, or here."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dnn_bench.cluster import Cluster
from dnn_bench.cluster.cluster import CONGESTION

if TYPE_CHECKING:
    from dnn_bench.launch import Place


def add_cluster(given: argparse.ArgumentParser, link: str = "1gbit") -> None:
    """The options that describe an emulated cluster."""
    given.add_argument("--hosts", type=int, default=2, metavar="N", help="emulated hosts")
    text = "speed of the links: 250mbit, unlimited, or one per host: 1gbit,250mbit"
    given.add_argument("--link", default=link, help=text)
    given.add_argument("--delay", help="latency of each link, such as 1ms (needs the kernel's netem)")
    text = "congestion control of the hosts' TCP, such as bbr"
    given.add_argument("--congestion", default=CONGESTION, help=text)


def add_place(given: argparse.ArgumentParser, link: str = "1gbit") -> None:
    """The options of an emulated cluster, and of ranks without one."""
    add_cluster(given, link)
    text = "run N ranks here, without emulated hosts and without root"
    given.add_argument("--local", type=int, metavar="N", help=text)
    given.add_argument("--threads", type=int, default=1, help="threads per rank")


@contextmanager
def place_of(options: argparse.Namespace) -> Iterator[Place]:
    """The place that the options of `add_place` describe."""
    from dnn_bench.launch import Hosts, ThisMachine

    if options.local is not None:
        if options.local < 1:
            raise ValueError(f"--local needs at least one rank, not {options.local}")
        yield ThisMachine(options.local, options.threads)
        return
    with Cluster(options.hosts, options.link, delay=options.delay, congestion=options.congestion) as cluster:
        yield Hosts(cluster, options.threads)
