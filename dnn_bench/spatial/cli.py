"""`python -m dnn_bench spatial`: training on tiles of large images, in stages and with replicas."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

from dnn_bench.cli_errors import one_line_errors
from dnn_bench.launch import launched
from dnn_bench.spatial.options import Plan, read
from dnn_bench.spatial.start import start


@one_line_errors(ValueError, RuntimeError)
def main(arguments: list[str]) -> int:
    plan = read(arguments)
    if not launched():
        return start(["spatial", *arguments], plan.ranks, plan.options)
    return run(plan)


def run(plan: Plan) -> int:
    """Run as one rank."""
    import torch

    import commsched as hvd

    torch.set_num_threads(plan.options.threads)
    hvd.init()
    try:
        if hvd.size() != plan.ranks:
            raise ValueError(
                f"{describe(plan)} needs {plan.ranks} ranks, and the launcher started {hvd.size()}; use -np"
                f" {plan.ranks}"
            )
        report = train(plan) if plan.options.app == 3 else train_on_files(plan)
        if hvd.rank() == 0:
            show(plan, report)
    finally:
        hvd.shutdown()
    return 0


def describe(plan: Plan) -> str:
    tiles = [f"a grid of {rows}x{columns} tiles" for rows, columns in plan.grids]
    share = f"{plan.options.local_DP} rank" + "s" * (plan.options.local_DP > 1)
    stages = [*tiles, *([f"whole images on {share}"] * (plan.stages - len(plan.grids)))]
    text = f"{plan.options.model} in {plan.stages} stages ({'; '.join(stages)})"
    if plan.options.replicas > 1:
        text += f", {plan.options.replicas} replicas"
    return text + (", mirrored replicas" if plan.mirrored else "")


def train_on_files(plan: Plan) -> dict[str, Any]:
    """Train on files by epochs; return the figures of all epochs."""
    from dnn_bench.spatial.files import train as by_epochs

    return by_epochs(plan, build(plan)[0], placements_of(plan))


def placements_of(plan: Plan) -> list[Any]:
    from commsched import spatial

    whole = [spatial.Samples(plan.options.local_DP)] * (plan.stages - len(plan.grids))
    return [*(spatial.Tiles(grid) for grid in plan.grids), *whole]


def train(plan: Plan) -> dict[str, Any]:
    """Train; return the times of the steps on the slowest rank, and the losses."""
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
        fuse_halo=plan.options.fused_layers if plan.options.halo_D2 else "off",
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
    rows = hvd.allgather_object((seconds, _peak_mib()))
    slowest = [max(row[0][number] for row in rows) for number in range(total)][plan.options.warmup :]
    return {
        "ranks": plan.ranks,
        "seconds": median(slowest),
        "images_per_second": plan.images / median(slowest),
        "losses": losses,
        "peak_mib": [peak for _, peak in rows],
    }


def build(plan: Plan) -> tuple[list[Any], Any, Any]:
    """Stages and one batch of random images, the same on every rank."""
    import torch

    from dnn_bench.spatial.models import MODELS, cut_stages, even_balance, target_of

    o = plan.options
    torch.manual_seed(o.seed)
    cells = MODELS[o.model](plan.layers, plan.filters, o.num_classes)
    balance = list(plan.balance) if plan.balance else even_balance(len(cells), plan.stages)
    if o.cuts:
        starts = [0, *map(int, o.cuts.split(",")), len(cells)]
        balance = [end - start for start, end in zip(starts, starts[1:])]
    generator = torch.Generator().manual_seed(o.seed)
    shape = (plan.images, 3, o.image_size, o.image_size)
    images = torch.randn(shape, generator=generator)
    return cut_stages(cells, balance), images, target_of(o.model, shape, o.num_classes, generator)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(plan: Plan, report: dict[str, Any]) -> None:
    o = plan.options
    if o.json:
        Path(o.json).write_text(json.dumps({**report, "options": vars(o)}, indent=1) + "\n")
    if "epochs" in report:
        return
    print(f"{describe(plan)}: {report['ranks']} ranks, {plan.images} images of {o.image_size}x{o.image_size}")
    print(f"step: {report['seconds']:.3f} s, {report['images_per_second']:.2f} images/s")
    print(f"largest rank: {max(report['peak_mib']):.0f} MiB of memory", flush=True)
