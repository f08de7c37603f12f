"""Measure a model layer by layer: a profile for `commsched partition`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from commsched.cli.options import add_job, console, job_name, job_of, milliseconds, table
from scheduler.formats.pipedream import Graph, format_graph
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--rows", type=int, required=True, metavar="N", help="rows of one micro-batch")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="measurements of each layer")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the profile to FILE, as JSON")
    parser.add_argument(
        "--link",
        metavar="FILE",
        help="under a launcher: also measure the cost of a message between two ranks and how much traffic"
        " slows computation down; write the link to FILE, the slowdown into the profile",
    )
    parser.add_argument("--graph", metavar="FILE", help="write the profile to FILE, as AshPipe's graph.txt")


def run_profile(arguments: argparse.Namespace) -> None:
    import torch

    from commsched.pipeline.profiling import profile

    if arguments.rows < 1 or arguments.repeat < 1:
        raise ValueError(
            f"--rows and --repeat must be at least 1, got {arguments.rows} and {arguments.repeat}"
        )
    torch.manual_seed(arguments.seed)
    job = job_of(arguments)
    batch = next(iter(job.batches(arguments.rows)))
    name = job_name(arguments)
    link, traffic = _traffic() if arguments.link else (None, 0.0)
    layers = profile(
        job.model,
        job.loss,
        batch,
        optimizer=job.optimizer,
        repeat=arguments.repeat,
        name=name,
        master_weights=job.master_weights,
        compression=job.compression,
    )
    measured = replace(layers, traffic_per_byte=traffic)
    # Under a launcher all ranks measure at the same time, as they will train; rank 0 writes.
    if int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))) == 0:
        _report(measured, arguments)
        if link is not None:
            link.save(arguments.link)
            console().print(f"link {link} written to {arguments.link}", markup=False)
    if link is not None:
        import commsched

        commsched.shutdown()


def _traffic() -> tuple[Link, float]:
    """Measure, on all ranks together, a message between two ranks and how much traffic slows computation."""
    import commsched
    from commsched.pipeline.messages import ProcessFabric
    from commsched.pipeline.profiling import message_link, traffic_cost

    commsched.init()
    fabric = ProcessFabric()
    link = message_link(fabric)
    return link, traffic_cost(fabric, link)


def _report(measured: Profile, arguments: argparse.Namespace) -> None:
    rows = [
        [
            layer.name,
            milliseconds(layer.forward),
            milliseconds(layer.backward),
            milliseconds(layer.weight_backward),
            f"{layer.bytes:,}",
            f"{layer.activation_bytes:,}",
        ]
        for layer in measured.layers
    ]
    columns = ["layer", "forward ms", "backward ms", "of it weights ms", "bytes", "activation bytes"]
    out = console()
    out.print(table(f"{measured.name}: {len(rows)} layers, {measured.compute * 1e3:.1f} ms", columns, rows))
    if arguments.output:
        measured.save(Path(arguments.output))
        out.print(f"written to {arguments.output}", markup=False)
    if arguments.graph:
        Path(arguments.graph).write_text(format_graph(Graph.chain(measured)))
        out.print(f"written to {arguments.graph}", markup=False)
