"""Who runs a spatial benchmark: the launcher's ranks, or ranks that the command starts itself."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from dnn_bench.cluster import Cluster
from dnn_bench.cluster.cli import wait_for_all
from dnn_bench.runner.place import environment

LAUNCHED = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


def launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(name in os.environ for name in LAUNCHED)


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="one rank on each of N emulated hosts, as root (default: no)"
    )
    parser.add_argument(
        "--link", default="250mbit", help="speed of the emulated hosts' links (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per rank (default: %(default)s)")


def start(command: Sequence[str], ranks: int, options: argparse.Namespace) -> int:
    """Runs ``python -m dnn_bench COMMAND...`` on ``ranks`` ranks; the exit status of the first that fails."""
    argv = [sys.executable, "-m", "dnn_bench", *command]
    variables = environment({}, options.threads)
    if options.hosts is not None:
        if options.hosts != ranks:
            raise ValueError(
                f"--hosts {options.hosts} runs {options.hosts} ranks, and this needs {ranks}; use --hosts"
                f" {ranks}"
            )
        with Cluster(options.hosts, options.link, ssh=False) as cluster:
            return wait_for_all(cluster.launch(argv, variables))
    with _processes(argv, ranks, variables) as processes:
        return wait_for_all(processes)


@contextmanager
def _processes(
    argv: Sequence[str], ranks: int, variables: Mapping[str, str]
) -> Iterator[list[subprocess.Popen]]:
    """Ranks on this machine, with the environment that torchrun would give them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            argv, env={**os.environ, **variables, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def grid_of(method: str, parts: int) -> tuple[int, int]:
    """The grid of tiles of a slice method: ``vertical`` cuts the width, ``horizontal`` the height, ``square``
    both alike.
    """
    if parts < 1:
        raise ValueError(f"--num-spatial-parts must be at least 1, got {parts}")
    if method == "vertical":
        return 1, parts
    if method == "horizontal":
        return parts, 1
    side = round(parts**0.5)
    if side * side != parts:
        raise ValueError(
            f"--slice-method square needs a square number of parts (4, 9, 16), got {parts}; use vertical or"
            " horizontal"
        )
    return side, side
