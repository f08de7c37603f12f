"""``commsched partition`` and ``commsched convert``: plans of pipelines, and AshPipe's files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsched.cli import options
from commsched.cli.options import console
from scheduler import profiles
from scheduler.formats.pipedream import Graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.inputs import InputError, whole
from scheduler.ir.layout import Placement, Samples, Tiles
from scheduler.ir.link import Cluster
from scheduler.pipelines.build import names, program_of
from scheduler.pipelines.convert import expecting, read_plan, write_files
from scheduler.pipelines.partition import RECOMPUTE, partition
from scheduler.pipelines.report import examine

# -- cut a model into the stages of a pipeline: a plan for `commsched train` and `convert` -------------------


def add_partition_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_profile(parser, " of one micro-batch")
    add = parser.add_argument
    add("--devices", required=True, type=int, metavar="N", help="number of devices")
    text = (
        "cost of one message on a device's (with --per-host: a host's) own link, as"
        " alpha=SECONDS,beta=SECONDS_PER_BYTE, a speed such as 10gbit, or FILE.json"
    )
    add("--link", required=True, metavar="L", help=text)
    options.add_hosts(parser, "devices")
    text = "memory of every device, or one size for each, for example 16g for 16 GiB (default: no limit)"
    add("--memory", metavar="SIZE[,SIZE...]", help=text)
    _add_search_arguments(parser)
    add("--output", "-o", metavar="FILE", help="write the plan to FILE")
    add("--json", action="store_true", help="print the plan as JSON instead of a summary")


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--schedule", default="pipedream", help=f"schedule of the pipeline: {', '.join(names())}")
    add("--microbatches", type=int, default=1, metavar="M", help="micro-batches of one optimizer step")
    text = "when to recompute activations in the backward instead of keeping them"
    add("--recompute", choices=tuple(RECOMPUTE), default="never", help=text)
    text = "bytes of optimizer state per byte of weights: 1 for momentum, 2 for Adam"
    add("--state", type=float, default=0.0, help=text)
    add("--max-stages", type=int, metavar="N", help="most stages to try (default: one per device)")
    text = "search cuts only, for stages on these grids of tiles or ranks that share samples: 2x2,1"
    add("--placements", metavar="P[,P...]", help=text)


def run_partition(arguments: argparse.Namespace) -> None:
    profile = profiles.find(arguments.profile)
    if arguments.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {arguments.devices}")
    levels = options.levels(arguments, arguments.devices, "devices")
    cluster = Cluster(levels, _memory(arguments.memory, arguments.devices))
    plan = partition(
        profile,
        cluster,
        arguments.schedule,
        microbatches=arguments.microbatches,
        recompute=arguments.recompute,
        state=arguments.state,
        max_stages=arguments.max_stages,
        placements=_placements(arguments.placements),
    )
    if arguments.output:
        plan.save(Path(arguments.output))
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return
    out = console()
    ends = (*plan.cuts[1:], len(profile.layers))
    for stage, (first, end) in enumerate(zip(plan.cuts, ends, strict=True)):
        recomputed = ", recomputed" if plan.recompute[stage] else ""
        devices = _counted(plan.replicas[stage % len(plan.replicas)], "device")
        grid = plan.tiles[stage] if plan.tiles else None
        tiles = f" with a tile of {'x'.join(map(str, grid.grid))} each" if grid else ""
        out.print(f"stage {stage}: layers {first}..{end - 1}, {devices}{tiles}{recomputed}")
    if plan.ranks < arguments.devices:
        out.print(
            f"{plan.ranks} of {arguments.devices} devices are used: start {_counted(plan.ranks, 'rank')}"
        )
    report = examine(program_of(plan, profile), profile, cluster.at(plan.devices))
    out.print(str(report), markup=False, highlight=False)
    if arguments.output:
        out.print(f"written to {arguments.output}", markup=False)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _placements(text: str | None) -> list[Placement]:
    try:
        words = text.split(",") if text else []
        sizes = [[whole(part, "a side") for part in word.split("x")] for word in words]
        return [Tiles(tuple(size)) if len(size) > 1 else Samples(size[0]) for size in sizes]
    except ValueError as error:
        raise InputError(
            f"--placements takes grids and numbers of ranks such as 2x2,1, got {text!r}: {error}"
        ) from None


def _memory(text: str | None, devices: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = [options.bytes_of("--memory", word) for word in text.split(",")]
    return tuple(sizes * devices if len(sizes) == 1 else sizes)


# -- write a plan as PipeDream's and AshPipe's files, or read such files -------------------------------------


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="plan to write as AshPipe's files")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json, to write as a plan; with --graph")
    add = parser.add_argument
    text = "with --plan: the profile that was partitioned, as a file (.json, graph.txt) or a shipped name"
    add("--profile", metavar="P", help=text)
    add("--graph", metavar="FILE", help="with --conf: the partitioned graph (gpus=N.txt)")
    text = "with --conf: record the step time that a simulation expects over such links between devices"
    add("--link", metavar="L", help=text)
    add("--schedule", help="with --conf: schedule of the plan (default: the one in the file, else ashpipe)")
    text = "with --plan: folder for the two files; with --conf: file for the plan"
    add("--output", "-o", required=True, metavar="PATH", help=text)


def run_convert(arguments: argparse.Namespace) -> None:
    _check_source(arguments)
    out = console()
    if arguments.plan:
        plan = PipelinePlan.load(arguments.plan)
        text = arguments.profile
        # The layers of any profile other than a graph.txt are a chain.
        graph = Graph.load(text) if text.endswith(".txt") else Graph.chain(profiles.find(text))
        for path in write_files(plan, graph, arguments.output):
            out.print(f"written to {path}", markup=False, highlight=False)
        return
    schedule = {"schedule": arguments.schedule} if arguments.schedule else {}
    plan = read_plan(arguments.conf, arguments.graph, **schedule)
    if arguments.link:
        cluster = Cluster.flat(max(plan.devices) + 1, options.load_link(arguments.link, "devices"))
        plan = expecting(plan, Graph.load(arguments.graph).profile(plan.model), cluster)
    plan.save(arguments.output)
    out.print(f"written to {arguments.output}", markup=False, highlight=False)


def _check_source(arguments: argparse.Namespace) -> None:
    allowed = ("profile",) if arguments.plan else ("graph", "link", "schedule")
    needed = allowed[0]
    source = "--plan" if arguments.plan else "--conf"
    if getattr(arguments, needed) is None:
        raise ValueError(f"{source} needs --{needed}: the other file does not list the layers")
    for name in ("profile", "graph", "link", "schedule"):
        if name not in allowed and getattr(arguments, name) is not None:
            raise ValueError(f"--{name} does not belong to {source}; leave it out")
