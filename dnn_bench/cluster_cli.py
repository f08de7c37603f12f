"""`python -m dnn_bench cluster`: run a command on every host of an emulated cluster."""

from __future__ import annotations

import argparse

from dnn_bench.cluster import Cluster, ClusterError
from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.launch import add_cluster, wait_for_all


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "cluster",
        "Builds hosts joined by links of a chosen speed on this machine (as root), runs the command once on "
        "each, with the environment torchrun would give it, and removes everything.",
    )
    add_cluster(given)
    text = "run it on host0 only, as for horovodrun and mpirun, and let the hosts reach each other by ssh"
    given.add_argument("--first-only", action="store_true", help=text)
    text = "the command to run on the hosts"
    given.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=text)
    return given.parse_args(arguments)


@one_line_errors(ClusterError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not argv:
        raise ClusterError("which command? python -m dnn_bench cluster --hosts 2 -- COMMAND")
    link = {"delay": options.delay, "congestion": options.congestion}
    with Cluster(options.hosts, options.link, **link, ssh=options.first_only) as cluster:
        processes = [cluster.run(0, argv)] if options.first_only else cluster.launch(argv)
        return wait_for_all(processes)
