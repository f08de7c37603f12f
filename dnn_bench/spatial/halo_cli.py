"""`python -m dnn_bench halo`: the halo exchange of one convolution, alone and with compute."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dnn_bench.command_line import one_line_errors, parser
from dnn_bench.spatial.options import SLICES, add_run, grid_of, on_ranks


def parse(arguments: list[str]) -> argparse.Namespace:
    given = parser(
        "halo",
        "Times the halo exchange of one convolution alone and with compute, and says how much of it the "
        "interior hides, beside what the simulator predicts. Runs under mpirun, torchrun or horovodrun; "
        "started by itself it starts its own ranks.",
    )
    given.add_argument("--image-size", default="8192x64", help="pixels: S or HxW")
    given.add_argument("--batch-size", type=int, default=2, help="images")
    given.add_argument("--num-filters", type=int, default=16, help="channels")
    given.add_argument("--halo-len", type=int, default=2, help="H of a kernel of 2*H+1")
    given.add_argument("--num-spatial-parts", type=int, default=2, help="tiles")
    text = "how the image is cut into tiles"
    given.add_argument("--slice-method", choices=SLICES, default="vertical", help=text)
    add_run(given, warmup=2, iterations=9)
    return given.parse_args(arguments)


@one_line_errors(ValueError, RuntimeError)
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    shape, grid = shape_of(options), grid_of(options.slice_method, options.num_spatial_parts)
    return on_ranks(["halo", *arguments], grid[0] * grid[1], options, lambda: run(options, shape, grid))


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Samples, channels, height and width."""
    sides = options.image_size.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError(f"--image-size is a number of pixels, 1024 or 2048x512, not {options.image_size!r}")
    for name in ("batch_size", "num_filters", "iterations", "halo_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    return options.batch_size, options.num_filters, int(sides[0]), int(sides[-1])


def run(options: argparse.Namespace, shape: tuple[int, int, int, int], grid: tuple[int, int]) -> None:
    """Measure as one rank; rank 0 prints."""
    import commsched as hvd
    from commsched.spatial import DistChannel
    from dnn_bench.spatial.halo import measure

    note = progress if hvd.rank() == 0 and sys.stderr.isatty() else lambda text: None
    channel, counts = DistChannel(hvd.data_group(channel=5)), (options.warmup, options.iterations)
    measured = measure(shape, options.halo_len, grid, counts, channel, note)
    if hvd.rank() == 0:
        show(measured, options)


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
