"""Options that start one rank by hand: without a launcher, rank by rank, as AshPipe is started."""

from __future__ import annotations

import argparse
import os


def add_ranks(parser: argparse.ArgumentParser) -> None:
    given = parser.add_argument_group("ranks started one by one, without a launcher")
    given.add_argument("--rank", type=int, metavar="N", help="this process's rank")
    given.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        metavar="N",
        help="its number on its machine (default: --rank)",
    )
    given.add_argument(
        "--master-addr", "--master_addr", default="127.0.0.1", metavar="A", help="address of rank 0's machine"
    )
    given.add_argument("--master-port", type=int, default=29500, metavar="N", help="a free port of it")
    given.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks (default: as the plan, or the stages, say)",
    )


def set_rank(arguments: argparse.Namespace, world: int | None) -> None:
    """Set the variables that a launcher would set. ``world``: the ranks of the plan, if it is known."""
    if arguments.rank is None:
        return
    size = arguments.world_size or world
    if size is None:
        raise ValueError("--rank needs the number of ranks: --world-size, a plan, or --stages")
    if world is not None and size != world:
        raise ValueError(f"--world-size is {size}, and the plan is for {world} ranks")
    if not 0 <= arguments.rank < size:
        raise ValueError(f"--rank must be 0 to {size - 1}, got {arguments.rank}")
    local = arguments.rank if arguments.local_rank is None else arguments.local_rank
    os.environ.update(
        RANK=str(arguments.rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local),
        MASTER_ADDR=arguments.master_addr,
        MASTER_PORT=str(arguments.master_port),
    )
