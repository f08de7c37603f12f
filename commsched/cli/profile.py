"""Measures a model layer by layer: a profile for `commsched partition`."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from commsched.cli.output import console, milliseconds, table
from scheduler.formats.graph_txt import Graph, write_graph
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--rows", type=int, required=True, metavar="N", help="rows of one micro-batch")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="measure so many times")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the profile here, as JSON")
    parser.add_argument(
        "--link",
        metavar="FILE",
        help="under a launcher: measure what a message between two ranks costs, and what traffic costs the"
        " computation; write the link here",
    )
    parser.add_argument("--graph", metavar="FILE", help="write it here too, as AshPipe's graph.txt")


def add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function that returns (model, loss, batches[, optimizer]); batches(rows) yields batches",
    )
    parser.add_argument("--seed", type=int, default=0, help="of torch's random numbers")


def run(arguments: argparse.Namespace) -> None:
    import torch

    from commsched.pipeline.job import load_job
    from commsched.pipeline.profiling import profile

    if arguments.rows < 1 or arguments.repeat < 1:
        raise ValueError(
            f"--rows and --repeat must be at least 1, got {arguments.rows} and {arguments.repeat}"
        )
    torch.manual_seed(arguments.seed)
    job = load_job(arguments.job)
    batch = next(iter(job.batches(arguments.rows)))
    name = arguments.job.rpartition(":")[2]
    link, traffic = _traffic() if arguments.link else (None, 0.0)
    made = profile(job.model, job.loss, batch, optimizer=job.optimizer, repeat=arguments.repeat, name=name)
    made = replace(made, traffic_per_byte=traffic)
    # Started by a launcher, all ranks measure at the same time, as they will train; one writes.
    if int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))) == 0:
        _report(made, arguments)
        if link is not None:
            link.save(arguments.link)
            console().print(f"link {link} written to {arguments.link}", markup=False)
    if link is not None:
        import commsched

        commsched.shutdown()


def _traffic() -> tuple[Link, float]:
    """What messages cost, and what they cost the computation; all ranks then stand at the same place."""
    import torch

    import commsched
    from commsched.pipeline.fabric import DistFabric
    from commsched.pipeline.profiling import message_link
    from commsched.pipeline.traffic_cost import traffic_cost

    torch.set_num_threads(1)
    commsched.init()
    fabric = DistFabric()
    link = message_link(fabric)
    return link, traffic_cost(fabric, link)


def _report(made: Profile, arguments: argparse.Namespace) -> None:
    rows = [
        [
            layer.name,
            milliseconds(layer.forward),
            milliseconds(layer.backward),
            milliseconds(layer.weight_backward),
            f"{layer.bytes:,}",
            f"{layer.activation_bytes:,}",
        ]
        for layer in made.layers
    ]
    columns = ["layer", "forward ms", "backward ms", "of it weights", "bytes", "activation"]
    out = console()
    out.print(table(f"{made.name}: {len(rows)} layers, {made.compute * 1e3:.1f} ms", columns, rows))
    if arguments.output:
        made.save(Path(arguments.output))
        out.print(f"written to {arguments.output}", markup=False)
    if arguments.graph:
        write_graph(Graph.chain(made), arguments.graph)
        out.print(f"written to {arguments.graph}", markup=False)
