"""MPI4DL's options: read, checked, and turned into stages and their places. Without torch, so it is quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dnn_bench.spatial.start import add_start_arguments, grid_of

MODES = ("lp", "sp", "gems", "gems+sp")
LAYERS = {"resnet": 18, "amoebanet": 6, "unet": 4}
FILTERS = {"resnet": 64, "amoebanet": 32, "unet": 16}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dnn_bench spatial",
        description="Trains a model on large images that are cut into tiles over ranks, its stages after that"
        " on whole images. Runs under mpirun, torchrun or horovodrun; started by itself it starts as many"
        " ranks as are needed.",
    )
    what = p.add_argument_group("model and data")
    what.add_argument("--model", choices=tuple(LAYERS), default="amoebanet")
    what.add_argument("--image-size", type=int, default=256, help="pixels a side (default: %(default)s)")
    what.add_argument(
        "--batch-size", type=int, default=2, help="images of a replica's step (default: %(default)s)"
    )
    what.add_argument("--num-classes", type=int, default=10, help="classes (default: %(default)s)")
    what.add_argument("--num-layers", type=int, help=f"layers of the model (default: {_list(LAYERS)})")
    what.add_argument("--num-filters", type=int, help=f"filters of the model (default: {_list(FILTERS)})")
    how = p.add_argument_group("parallelism")
    how.add_argument(
        "--mode",
        choices=MODES,
        help="lp: stages on a rank each; sp: the first stages on tiles; gems: two replicas in mirrored rank"
        " order (default: sp with --spatial-size, else lp)",
    )
    how.add_argument("--split-size", type=int, default=2, help="stages (default: %(default)s)")
    how.add_argument("--spatial-size", type=int, help="stages that run on tiles (default for sp: 1)")
    how.add_argument(
        "--num-spatial-parts",
        default="4",
        help="tiles, or one number per tiled stage such as 4,2 (default: %(default)s)",
    )
    how.add_argument(
        "--slice-method",
        choices=("square", "vertical", "horizontal"),
        default="square",
        help="how the image is cut into tiles (default: %(default)s)",
    )
    how.add_argument("--parts", type=int, default=1, help="micro-batches of a batch (default: %(default)s)")
    how.add_argument("--balance", help="cells in each stage: 3,4 (default: equally many)")
    how.add_argument("--cuts", help="first cells of the later stages, instead of --balance: 3,5")
    how.add_argument("--times", type=int, default=1, help="gems: batches of a step (default: %(default)s)")
    how.add_argument(
        "--local-DP",
        type=int,
        default=1,
        help="ranks that share the samples of later stages (default: %(default)s)",
    )
    how.add_argument("--replicas", type=int, default=1, help="data-parallel replicas (default: %(default)s)")
    how.add_argument("--halo-D2", action="store_true", help="one wide halo for several layers")
    how.add_argument(
        "--fused-layers",
        type=int,
        default=2,
        help="with --halo-D2: layers that share one halo (default: %(default)s)",
    )
    how.add_argument("--overlap", choices=("auto", "on", "off"), default="auto")
    how.add_argument(
        "--enable-master-comm-opt",
        action="store_true",
        help="gems: accepted for MPI4DL's scripts; sums over mirrored replicas always run beside other work",
    )
    files = p.add_argument_group("training on files")
    files.add_argument(
        "--app",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="data: 1 image files, 2 CIFAR-10's files, 3 random images to measure (default: %(default)s)",
    )
    files.add_argument(
        "--datapath",
        default="./train",
        help="app 1: folder with train/CLASS/*.png and val/CLASS/*.png (unet: images and masks in train and"
        " val); app 2: folder with data_batch_1 ... (default: %(default)s)",
    )
    files.add_argument(
        "--num-epochs", type=int, default=1, help="epochs of app 1 and 2 (default: %(default)s)"
    )
    files.add_argument(
        "--num-workers", type=int, default=0, help="processes that read data (default: %(default)s)"
    )
    files.add_argument("--learning-rate", type=float, default=0.01, help="of SGD (default: %(default)s)")
    files.add_argument("--enable-evaluation", action="store_true", help="score test data after each epoch")
    files.add_argument("--checkpoint", metavar="DIR", help="write checkpoints, and continue from the latest")
    files.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="besides one after every epoch"
    )
    files.add_argument("--save", metavar="FILE", help="write the trained model's state_dict to FILE")
    run = p.add_argument_group("measuring")
    run.add_argument("--warmup", type=int, default=2, help="untimed steps (default: %(default)s)")
    run.add_argument("--iterations", type=int, default=5, help="timed steps (default: %(default)s)")
    run.add_argument("--json", metavar="FILE", help="write all measurements to this file")
    run.add_argument("--seed", type=int, default=0, help="seed of weights and images (default: %(default)s)")
    add_start_arguments(p)
    return p


def _list(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True)
class Plan:
    """What the options mean. ``grids``: of the stages on tiles; the other ``stages`` run on whole images."""

    options: argparse.Namespace
    mode: str
    layers: int
    filters: int
    grids: tuple[tuple[int, int], ...]
    balance: tuple[int, ...] | None

    @property
    def stages(self) -> int:
        return int(self.options.split_size)

    @property
    def mirrored(self) -> bool:
        return self.mode.startswith("gems")

    @property
    def microbatches(self) -> int:
        return int(self.options.parts) * (int(self.options.times) if self.mirrored else 1)

    @property
    def ranks(self) -> int:
        tiled = sum(rows * columns for rows, columns in self.grids)
        whole = (self.stages - len(self.grids)) * self.options.local_DP
        return int((tiled + whole) * self.options.replicas)

    @property
    def images(self) -> int:
        """Samples of one step."""
        times = int(self.options.times) if self.mirrored else 1
        return int(self.options.batch_size) * int(self.options.replicas) * (1 + self.mirrored) * times


def read(arguments: list[str]) -> Plan:
    """The plan; a ValueError says which option is wrong and what it may be."""
    o = parser().parse_args(arguments)
    counts = (
        "image_size",
        "batch_size",
        "num_classes",
        "split_size",
        "parts",
        "times",
        "local_DP",
        "replicas",
    )
    for name in (*counts, "fused_layers", "iterations"):
        if getattr(o, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(o, name)}")
    mode = o.mode or ("sp" if o.spatial_size else "lp")
    spatial = _spatial_size(o, mode)
    if o.batch_size % o.parts:
        raise ValueError(
            f"--parts {o.parts} must divide --batch-size {o.batch_size}: micro-batches are equally large"
        )
    if spatial < o.split_size and (o.batch_size // o.parts) % o.local_DP:
        raise ValueError(
            f"--local-DP {o.local_DP} must divide the {o.batch_size // o.parts} samples of a micro-batch"
            " (--batch-size / --parts)"
        )
    if o.times > 1 and not mode.startswith("gems"):
        raise ValueError("--times is for --mode gems and gems+sp; --parts cuts a batch in micro-batches")
    if o.enable_master_comm_opt and not mode.startswith("gems"):
        raise ValueError("--enable-master-comm-opt is for --mode gems and gems+sp")
    if o.app == 3 and (o.checkpoint or o.enable_evaluation):
        raise ValueError("--checkpoint and --enable-evaluation need data: --app 1 or 2, and --datapath")
    layers, filters = o.num_layers or LAYERS[o.model], o.num_filters or FILTERS[o.model]
    return Plan(o, mode, layers, filters, _grids(o, spatial), _balance(o))


def _spatial_size(o: argparse.Namespace, mode: str) -> int:
    if not mode.endswith("sp"):
        if o.spatial_size:
            raise ValueError(
                f"--mode {mode} has no stages on tiles; leave --spatial-size out, or use --mode sp"
            )
        return 0
    size = 1 if o.spatial_size is None else int(o.spatial_size)
    if not 1 <= size <= o.split_size:
        raise ValueError(f"--spatial-size must be 1 to --split-size, which is {o.split_size}, got {size}")
    return size


def _grids(o: argparse.Namespace, spatial: int) -> tuple[tuple[int, int], ...]:
    parts = _numbers("--num-spatial-parts", o.num_spatial_parts)
    if len(parts) not in (1, max(spatial, 1)):
        raise ValueError(
            f"--num-spatial-parts is one number, or one for each of the {spatial} stages on tiles, not"
            f" {o.num_spatial_parts}"
        )
    parts = parts * spatial if len(parts) == 1 else parts
    return tuple(grid_of(o.slice_method, count) for count in parts[:spatial])


def _balance(o: argparse.Namespace) -> tuple[int, ...] | None:
    if o.cuts is not None and len(_numbers("--cuts", o.cuts)) != o.split_size - 1:
        raise ValueError(
            f"--cuts needs {o.split_size - 1} numbers for --split-size {o.split_size}, got {o.cuts}"
        )
    if o.balance is None:
        return None
    if o.cuts is not None:
        raise ValueError("--cuts and --balance say the same; give one of them")
    balance = _numbers("--balance", o.balance)
    if len(balance) != o.split_size:
        raise ValueError(
            f"--balance needs a number for each of the {o.split_size} stages (--split-size), got {o.balance}"
        )
    return tuple(balance)


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise ValueError(f"{option} is a list of numbers of at least 1 such as 4,2, not {text!r}")
    return [int(word) for word in words]
