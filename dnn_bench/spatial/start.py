"""How a spatial benchmark starts its ranks, and its grid of tiles."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from dnn_bench.cluster import Cluster
from dnn_bench.launch import Hosts, ThisMachine, launched, run

SLICES = ("square", "vertical", "horizontal")


def add_run(given: argparse.ArgumentParser, warmup: int, iterations: int) -> None:
    """The options that say where ranks run, and for how long."""
    given.add_argument("--warmup", type=int, default=warmup, help="untimed iterations")
    given.add_argument("--iterations", type=int, default=iterations, help="timed iterations")
    given.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    text = "one rank on each of N emulated hosts, as root (default: no)"
    given.add_argument("--hosts", type=int, metavar="N", help=text)
    given.add_argument("--link", default="250mbit", help="speed of the emulated hosts' links")
    given.add_argument("--threads", type=int, default=1, help="threads per rank")


def on_ranks(command: Sequence[str], ranks: int, options: argparse.Namespace, act: Callable[[], None]) -> int:
    """Call ``act`` if a launcher started this rank; otherwise run the command on ``ranks`` ranks."""
    if launched():
        return _as_rank(ranks, options.threads, act)
    program = ["-m", "dnn_bench", *command]
    if options.hosts is None:
        return run(ThisMachine(ranks, options.threads), program)
    if options.hosts != ranks:
        raise ValueError(
            f"--hosts {options.hosts} runs {options.hosts} ranks, and this needs {ranks}; use --hosts {ranks}"
        )
    with Cluster(options.hosts, options.link) as cluster:
        return run(Hosts(cluster, options.threads), program)


def _as_rank(ranks: int, threads: int, act: Callable[[], None]) -> int:
    import torch

    import commsched as hvd

    torch.set_num_threads(threads)
    hvd.init()
    try:
        if hvd.size() != ranks:
            started = f"the launcher started {hvd.size()}"
            raise ValueError(f"the command needs {ranks} ranks, and {started}; use -np {ranks}")
        act()
    finally:
        hvd.shutdown()
    return 0


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
