"""`python -m dnn_bench spatial`: training on tiles of large images, in stages and with replicas; `halo`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from statistics import median
from typing import Any

from dnn_bench.command_line import check_least, numbers, one_line_errors, parser
from dnn_bench.spatial.options import SLICES, StagePlan, add_run, grid_of, on_ranks, read


@one_line_errors(ValueError, RuntimeError)
def main(arguments: list[str]) -> int:
    plan = read(arguments)
    act = train if plan.options.app == 3 else train_on_files
    return on_ranks(["spatial", *arguments], plan.ranks, plan.options, lambda: act(plan))


def describe(plan: StagePlan) -> str:
    tiles = [f"a grid of {rows}x{columns} tiles" for rows, columns in plan.grids]
    share = f"{plan.options.local_DP} rank" + "s" * (plan.options.local_DP > 1)
    stages = [*tiles, *([f"whole images on {share}"] * (plan.options.split_size - len(plan.grids)))]
    text = f"{plan.options.model} in {plan.options.split_size} stages ({'; '.join(stages)})"
    if plan.options.replicas > 1:
        text += f", {plan.options.replicas} replicas"
    return text + (", mirrored replicas" if plan.mirrored else "")


def train_on_files(plan: StagePlan) -> None:
    """Train on files by epochs; rank 0 writes the figures of all epochs."""
    import commsched as hvd
    from dnn_bench.spatial.models import train as by_epochs

    report = by_epochs(plan, build(plan)[0], placements_of(plan))
    if hvd.rank() == 0:
        write(plan, report)


def placements_of(plan: StagePlan) -> list[Any]:
    from commsched import spatial

    whole = [spatial.Samples(plan.options.local_DP)] * (plan.options.split_size - len(plan.grids))
    return [*(spatial.Tiles(grid) for grid in plan.grids), *whole]


def train(plan: StagePlan) -> None:
    """Train as one rank; rank 0 reports the times of the steps on the slowest rank, and the losses."""
    import torch
    import torch.nn.functional as F

    import commsched as hvd
    from commsched import spatial

    stages, images, target = build(plan)
    trainer = spatial.Hybrid(
        stages,
        placements_of(plan),
        loss=F.cross_entropy,
        microbatches=plan.microbatches,
        replicas=plan.options.replicas,
        mirrored=plan.mirrored,
        overlap=plan.options.overlap,
    )
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01)
    seconds, losses = [], []
    total = plan.options.warmup + plan.options.iterations
    for number in range(total):
        hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        losses.append(trainer.step(images, target))
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if hvd.rank() == 0:
            print(f"step {number + 1}/{total}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", flush=True)
    rows = hvd.allgather_object((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    slowest = [max(row[0][number] for row in rows) for number in range(total)][plan.options.warmup :]
    if hvd.rank() == 0:
        peaks = [peak for _, peak in rows]
        rate = plan.images / median(slowest)
        report = {"ranks": plan.ranks, "seconds": median(slowest), "images_per_second": rate}
        show(plan, {**report, "losses": losses, "peak_mib": peaks})


def build(plan: StagePlan) -> tuple[list[Any], Any, Any]:
    """Stages and one batch of random images, the same on every rank."""
    import torch

    from dnn_bench.spatial.models import MODELS, cut_stages, even_balance, target_of

    o = plan.options
    torch.manual_seed(o.seed)
    cells = MODELS[o.model](o.num_layers, o.num_filters, o.num_classes)
    if o.balance:
        balance = numbers("--balance", o.balance)
    else:
        balance = even_balance(len(cells), o.split_size)
    generator = torch.Generator().manual_seed(o.seed)
    shape = (plan.images, 3, o.image_size, o.image_size)
    images = torch.randn(shape, generator=generator)
    return cut_stages(cells, balance), images, target_of(o.model, shape, o.num_classes, generator)


def show(plan: StagePlan, report: dict[str, Any]) -> None:
    o = plan.options
    print(f"{describe(plan)}: {report['ranks']} ranks, {plan.images} images of {o.image_size}x{o.image_size}")
    print(f"step: {report['seconds']:.3f} s, {report['images_per_second']:.2f} images/s")
    print(f"largest rank: {max(report['peak_mib']):.0f} MiB of memory", flush=True)
    write(plan, report)


def write(plan: StagePlan, report: dict[str, Any]) -> None:
    if plan.options.json:
        given = {**vars(plan.options), "json": str(plan.options.json)}
        plan.options.json.write_text(json.dumps({**report, "options": given}, indent=1) + "\n")


# -- the halo exchange of one convolution, alone and with compute --------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser(
        "halo",
        "Times the halo exchange of one convolution alone and with compute, and says how much of it the "
        "interior hides, beside what the simulator predicts. Runs under mpirun, torchrun or horovodrun; "
        "started by itself it starts its own ranks.",
    )
    command.add_argument("--image-size", default="8192x64", help="pixels: S or HxW")
    command.add_argument("--batch-size", type=int, default=2, help="images")
    command.add_argument("--num-filters", type=int, default=16, help="channels")
    command.add_argument("--halo-len", type=int, default=2, help="H of a kernel of 2*H+1")
    command.add_argument("--num-spatial-parts", type=int, default=2, help="tiles")
    text = "how the image is cut into tiles"
    command.add_argument("--slice-method", choices=SLICES, default="vertical", help=text)
    add_run(command, warmup=2, iterations=9)
    return command.parse_args(arguments)


@one_line_errors(ValueError, RuntimeError)
def halo(arguments: list[str]) -> int:
    options = parse(arguments)
    shape, grid = shape_of(options), grid_of(options.slice_method, options.num_spatial_parts)
    return on_ranks(
        ["halo", *arguments], grid[0] * grid[1], options, lambda: measure_halo(options, shape, grid)
    )


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Samples, channels, height and width."""
    sides = options.image_size.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) for side in sides):
        raise ValueError(f"--image-size is a number of pixels, 1024 or 2048x512, not {options.image_size!r}")
    check_least(options, 1, "batch_size", "num_filters", "iterations", "halo_len")
    return options.batch_size, options.num_filters, int(sides[0]), int(sides[-1])


def measure_halo(
    options: argparse.Namespace, shape: tuple[int, int, int, int], grid: tuple[int, int]
) -> None:
    """Measure as one rank; rank 0 prints."""
    import commsched as hvd
    from commsched import spatial
    from dnn_bench.spatial.halo import measure

    note = progress if hvd.rank() == 0 and sys.stderr.isatty() else lambda text: None
    channel, counts = spatial.channel(), (options.warmup, options.iterations)
    measured = measure(shape, options.halo_len, grid, counts, channel, note)
    if hvd.rank() == 0:
        show_halo(measured, options)


def progress(text: str) -> None:
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def show_halo(measured: dict[str, Any], options: argparse.Namespace) -> None:
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
