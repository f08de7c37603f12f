"""`python -m dnn_bench halo`: the halo exchange of one convolution, alone and with compute."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dnn_bench.cli_errors import one_line_errors
from dnn_bench.launch import launched
from dnn_bench.spatial.start import add_start_arguments, grid_of, start


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench halo",
        description="Times the halo exchange of one convolution alone and with compute, and says how much of"
        " it the interior hides, beside what the simulator predicts. Runs under mpirun, torchrun or"
        " horovodrun; started by itself it starts its own ranks.",
    )
    parser.add_argument("--image-size", default="8192x64", help="pixels: S or HxW (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="images (default: %(default)s)")
    parser.add_argument("--num-filters", type=int, default=16, help="channels (default: %(default)s)")
    parser.add_argument(
        "--halo-len", type=int, default=2, help="H of a kernel of 2*H+1 (default: %(default)s)"
    )
    parser.add_argument("--num-spatial-parts", type=int, default=2, help="tiles (default: %(default)s)")
    parser.add_argument(
        "--slice-method",
        choices=("vertical", "horizontal", "square"),
        default="vertical",
        help="how the image is cut into tiles (default: %(default)s)",
    )
    parser.add_argument("--warmup", type=int, default=2, help="untimed iterations (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=9, help="timed iterations (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    add_start_arguments(parser)
    return parser.parse_args(arguments)


@one_line_errors(ValueError, RuntimeError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    shape, grid = shape_of(options), grid_of(options.slice_method, options.num_spatial_parts)
    if not launched():
        return start(["halo", *arguments], grid[0] * grid[1], options)
    return run(options, shape, grid)


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Samples, channels, height and width."""
    sides = options.image_size.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError(f"--image-size is a number of pixels, 1024 or 2048x512, not {options.image_size!r}")
    for name in ("batch_size", "num_filters", "iterations", "halo_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    return options.batch_size, options.num_filters, int(sides[0]), int(sides[-1])


def run(options: argparse.Namespace, shape: tuple[int, int, int, int], grid: tuple[int, int]) -> int:
    """Run as one rank."""
    import torch

    import commsched as hvd
    from commsched.spatial import DistChannel
    from dnn_bench.spatial.halo import Convolution, measure

    torch.set_num_threads(options.threads)
    hvd.init()
    try:
        if hvd.size() != grid[0] * grid[1]:
            raise ValueError(
                f"{options.num_spatial_parts} tiles need as many ranks, and the launcher started {hvd.size()}"
            )
        work = Convolution(shape, 2 * options.halo_len + 1, grid, options.warmup, options.iterations)
        first = hvd.rank() == 0
        note = progress if first and sys.stderr.isatty() else lambda text: None
        measured = measure(work, DistChannel(hvd.data_group(channel=5)), note).to_dict()
        if first:
            show(measured, options)
    finally:
        hvd.shutdown()
    return 0


def progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def show(measured: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"image {options.batch_size}x{options.num_filters}x{options.image_size}, halo {options.halo_len}")
    print(f"{'':12} {'forward':>10} {'backward':>10}")
    for name in ("halo", "compute", "waiting", "overlapped"):
        print(f"{name:12} {1e3 * measured[name][0]:7.1f} ms {1e3 * measured[name][1]:7.1f} ms")
    print(f"bytes sent   {measured['sent'][0]:10,} {measured['sent'][1]:10,}")
    enough = "large enough" if measured["large_enough"] else "too small"
    print(f"the interior is {enough}: the simulator says that {measured['predicted']:.0%} are hidden")
    print(f"hidden: {measured['hidden']:.0%} of the halo time", flush=True)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")
