"""How a spatial benchmark starts its ranks, and its grid of tiles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dnn_bench.cluster import Cluster
from dnn_bench.launch import Hosts, ThisMachine, run


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="one rank on each of N emulated hosts, as root (default: no)"
    )
    parser.add_argument(
        "--link", default="250mbit", help="speed of the emulated hosts' links (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads per rank (default: %(default)s)")


def start(command: Sequence[str], ranks: int, options: argparse.Namespace) -> int:
    """Run ``python -m dnn_bench COMMAND...`` on ``ranks`` ranks; the exit status of the first that fails."""
    program = ["-m", "dnn_bench", *command]
    if options.hosts is None:
        return run(ThisMachine(ranks, options.threads), program)
    if options.hosts != ranks:
        raise ValueError(
            f"--hosts {options.hosts} runs {options.hosts} ranks, and this needs {ranks}; use --hosts {ranks}"
        )
    with Cluster(options.hosts, options.link, ssh=False) as cluster:
        return run(Hosts(cluster, options.threads), program)


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
