"""MPI4DL's options: read, checked, and turned into stages and their places. Without torch, so it is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dnn_bench.cluster import Cluster
from dnn_bench.command_line import check_least, numbers, parser
from dnn_bench.launch import Hosts, ThisMachine, launched, run

SLICES = ("square", "vertical", "horizontal")
MODES = ("lp", "sp", "gems", "gems+sp")
LAYERS = {"resnet": 18, "amoebanet": 6, "unet": 4}
FILTERS = {"resnet": 64, "amoebanet": 32, "unet": 16}


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "spatial",
        "Trains a model on large images that are cut into tiles over ranks, its stages after that on whole "
        "images. Runs under mpirun, torchrun or horovodrun; started by itself it starts as many ranks as are "
        "needed.",
    )
    add = command.add_argument_group("model and data").add_argument
    add("--model", choices=tuple(LAYERS), default="amoebanet", help="architecture")
    add("--image-size", type=int, default=256, help="pixels a side")
    add("--batch-size", type=int, default=2, help="images of a replica's step")
    add("--num-classes", type=int, default=10, help="classes")
    add("--num-layers", type=int, help=f"layers of the model (default: {_list(LAYERS)})")
    add("--num-filters", type=int, help=f"filters of the model (default: {_list(FILTERS)})")
    add("--seed", type=int, default=0, help="seed of weights and images")
    add = command.add_argument_group("parallelism").add_argument
    text = (
        "lp: stages on a rank each; sp: the first stages on tiles; gems: two replicas in mirrored rank order "
    )
    add("--mode", choices=MODES, help=text + "(default: sp with --spatial-size, else lp)")
    add("--split-size", type=int, default=2, help="stages")
    add("--spatial-size", type=int, help="stages that run on tiles (default for sp: 1)")
    add("--num-spatial-parts", help="tiles (default: 4), or one number per tiled stage such as 4,2")
    add("--slice-method", choices=SLICES, help="how the image is cut into tiles (default: square)")
    add("--parts", type=int, default=1, help="micro-batches of a batch")
    add("--balance", help="cells in each stage: 3,4 (default: equally many)")
    add("--times", type=int, default=1, help="gems: batches of a step")
    add("--local-DP", type=int, default=1, help="ranks that share the samples of later stages")
    add("--replicas", type=int, default=1, help="data-parallel replicas")
    add("--overlap", choices=("auto", "on", "off"), default="auto", help="compute interiors during exchanges")
    accepted = "accepted for MPI4DL's scripts; "
    text = accepted + "sums over mirrored replicas always run beside other work"
    add("--enable-master-comm-opt", action="store_true", help=text)
    add("--halo-D2", action="store_true", help=accepted + "every layer fetches a halo of its own")
    add("--fused-layers", help=accepted + "see --halo-D2")
    _add_files(command.add_argument_group("training on files").add_argument)
    add_run(command, warmup=2, iterations=5)
    return command.parse_args(arguments)


def _add_files(add: Callable[..., object]) -> None:
    text = "data: 1 image files, 2 CIFAR-10's files, 3 random images to measure"
    add("--app", type=int, choices=(1, 2, 3), default=3, help=text)
    text = (
        "app 1: folder with train/CLASS/*.png and val/CLASS/*.png (unet: images and masks in train and val);"
    )
    add("--datapath", default="./train", help=text + " app 2: folder with data_batch_1 ...")
    add("--num-epochs", type=int, default=1, help="epochs of app 1 and 2")
    add("--num-workers", type=int, default=0, help="processes that read data")
    add("--learning-rate", type=float, default=0.01, help="of SGD")
    add("--enable-evaluation", action="store_true", help="score test data after each epoch")
    add("--checkpoint", metavar="DIR", help="write checkpoints, and continue from the latest")
    text = "besides one after every epoch"
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help=text)
    add("--save", metavar="FILE", help="write the trained model's state_dict to FILE")


def _list(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True)
class StagePlan:
    """The stages and samples that the options mean. Stages without a grid of tiles run on whole images."""

    options: argparse.Namespace
    grids: tuple[tuple[int, int], ...]
    mirrored: bool
    microbatches: int
    ranks: int
    images: int  # of one step


def read(arguments: list[str]) -> StagePlan:
    """The plan; a ValueError says which option is wrong and what it may be."""
    o = parse(arguments)
    mode = o.mode or ("sp" if o.spatial_size else "lp")
    mirrored, spatial = mode.startswith("gems"), _spatial_size(o, mode)
    _check(o, mirrored, spatial)
    o.num_layers, o.num_filters = o.num_layers or LAYERS[o.model], o.num_filters or FILTERS[o.model]
    grids = _grids(o, spatial)
    tiled = sum(rows * columns for rows, columns in grids)
    return StagePlan(
        o,
        grids,
        mirrored,
        microbatches=o.parts * o.times,
        ranks=(tiled + (o.split_size - spatial) * o.local_DP) * o.replicas,
        images=o.batch_size * o.replicas * (1 + mirrored) * o.times,
    )


def _check(o: argparse.Namespace, mirrored: bool, spatial: int) -> None:
    """Options that do not go together."""
    counts = "image_size batch_size num_classes split_size parts times local_DP replicas".split()
    check_least(o, 1, *counts, "iterations")
    if o.batch_size % o.parts:
        raise ValueError(
            f"--parts {o.parts} must divide --batch-size {o.batch_size}: micro-batches are equally large"
        )
    if spatial < o.split_size and (o.batch_size // o.parts) % o.local_DP:
        raise ValueError(
            f"--local-DP {o.local_DP} must divide the {o.batch_size // o.parts} samples of a micro-batch"
            " (--batch-size / --parts)"
        )
    if o.times > 1 and not mirrored:
        raise ValueError("--times is for --mode gems and gems+sp; --parts cuts a batch in micro-batches")
    if o.enable_master_comm_opt and not mirrored:
        raise ValueError("--enable-master-comm-opt is for --mode gems and gems+sp")
    if o.app == 3 and (o.checkpoint or o.enable_evaluation):
        raise ValueError("--checkpoint and --enable-evaluation need data: --app 1 or 2, and --datapath")
    if o.balance and len(numbers("--balance", o.balance)) != o.split_size:
        raise ValueError(
            f"--balance needs a number for each of the {o.split_size} stages (--split-size), got {o.balance}"
        )


def _spatial_size(o: argparse.Namespace, mode: str) -> int:
    if not mode.endswith("sp"):
        if o.spatial_size:
            raise ValueError(
                f"--mode {mode} has no stages on tiles; leave --spatial-size out, or use --mode sp"
            )
        if o.num_spatial_parts or o.slice_method:
            raise ValueError(
                "--num-spatial-parts and --slice-method are for stages on tiles; give --spatial-size, too, or"
                " --mode sp or gems+sp"
            )
        return 0
    size = 1 if o.spatial_size is None else int(o.spatial_size)
    if not 1 <= size <= o.split_size:
        raise ValueError(f"--spatial-size must be 1 to --split-size, which is {o.split_size}, got {size}")
    return size


def _grids(o: argparse.Namespace, spatial: int) -> tuple[tuple[int, int], ...]:
    parts = numbers("--num-spatial-parts", o.num_spatial_parts or "4")
    if len(parts) not in (1, max(spatial, 1)):
        raise ValueError(
            f"--num-spatial-parts is one number, or one for each of the {spatial} stages on tiles, not"
            f" {o.num_spatial_parts}"
        )
    parts = parts * spatial if len(parts) == 1 else parts
    return tuple(grid_of(o.slice_method or "square", count) for count in parts[:spatial])


def add_run(command: argparse.ArgumentParser, warmup: int, iterations: int) -> None:
    """The options that say where ranks run, and for how long."""
    command.add_argument("--warmup", type=int, default=warmup, help="untimed iterations")
    command.add_argument("--iterations", type=int, default=iterations, help="timed iterations")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    text = "one rank on each of N emulated hosts, as root (default: no)"
    command.add_argument("--hosts", type=int, metavar="N", help=text)
    command.add_argument("--link", default="250mbit", help="speed of the emulated hosts' links")
    command.add_argument("--threads", type=int, default=1, help="threads per rank")


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
