"""`python -m dnn_bench cluster`: run a command on every host of an emulated cluster."""

from __future__ import annotations

import argparse

from dnn_bench.cli_errors import one_line_errors
from dnn_bench.cluster.cluster import CONGESTION, Cluster
from dnn_bench.cluster.system import ClusterError


def add_cluster_arguments(parser: argparse.ArgumentParser, link: str = "1gbit") -> None:
    """The options that describe an emulated cluster."""
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="emulated hosts (default: %(default)s)"
    )
    parser.add_argument(
        "--link",
        default=link,
        help="speed of the links: 250mbit, unlimited, or one per host: 1gbit,250mbit (default: %(default)s)",
    )
    parser.add_argument("--delay", help="latency of each link, such as 1ms (needs the kernel's netem)")
    parser.add_argument(
        "--congestion",
        default=CONGESTION,
        help="congestion control of the hosts' TCP, such as bbr (default: %(default)s)",
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench cluster",
        description="Builds hosts joined by links of a chosen speed on this machine (as root), runs the "
        "command once on each, with the environment torchrun would give it, and removes everything.",
    )
    add_cluster_arguments(parser)
    parser.add_argument(
        "--first-only",
        action="store_true",
        help="run it on host0 only, as for horovodrun and mpirun, and let the hosts reach each other by ssh",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run on the hosts"
    )
    return parser.parse_args(arguments)


@one_line_errors(ClusterError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        raise ClusterError("which command? python -m dnn_bench cluster --hosts 2 -- COMMAND")
    from dnn_bench.launch import wait_for_all

    link = {"delay": options.delay, "congestion": options.congestion}
    with Cluster(options.hosts, options.link, **link, ssh=options.first_only) as cluster:
        processes = [cluster.run(0, argv)] if options.first_only else cluster.launch(argv)
        return wait_for_all(processes)
