"""Cuts a model into the stages of a pipeline: a plan for `commsched train` and `convert`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from commsched.cli import options
from commsched.cli.output import console
from scheduler import profiles
from scheduler.ir.cluster import Cluster
from scheduler.ir.link import Level
from scheduler.pipelines.build import program_of
from scheduler.pipelines.planner.partition import RECOMPUTE, partition
from scheduler.pipelines.report import examine

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>|k|m|g|t)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        required=True,
        metavar="P",
        help=f"of one micro-batch: a file (.json or graph.txt) or one of: {', '.join(profiles.names())}",
    )
    parser.add_argument("--devices", required=True, type=int, metavar="N", help="number of devices")
    parser.add_argument(
        "--link", required=True, metavar="L", help="a device's (with --per-host: a host's) wire"
    )
    parser.add_argument("--per-host", type=int, metavar="N", help="devices that share a host")
    parser.add_argument("--inside", metavar="L", help="with --per-host: the wire between devices of one host")
    parser.add_argument(
        "--memory", metavar="SIZE[,SIZE...]", help="of every device or of each, for example 16g (GiB)"
    )
    parser.add_argument("--schedule", default="pipedream", help="pipedream, ashpipe, 2bw, 1f1b or gpipe")
    parser.add_argument("--microbatches", type=int, default=1, metavar="M", help="per optimizer step")
    parser.add_argument("--recompute", choices=tuple(RECOMPUTE), default="never", help="activations")
    parser.add_argument(
        "--state", type=float, default=0.0, help="optimizer's bytes per byte of weights (momentum 1, Adam 2)"
    )
    parser.add_argument("--max-stages", type=int, metavar="N", help="no deeper pipelines than this")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the plan here")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> None:
    profile = options.load_profile(arguments.profile)
    cluster = _cluster(arguments)
    plan = partition(
        profile,
        cluster,
        arguments.schedule,
        microbatches=arguments.microbatches,
        recompute=arguments.recompute,
        state=arguments.state,
        max_stages=arguments.max_stages,
    )
    if arguments.output:
        plan.save(Path(arguments.output))
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return
    out = console()
    ends = (*plan.cuts[1:], len(profile.layers))
    for stage, (first, end) in enumerate(zip(plan.cuts, ends, strict=True)):
        again = ", recomputed" if plan.recompute[stage] else ""
        devices = plan.replicas[stage]
        several = "s" if devices > 1 else ""
        out.print(f"stage {stage}: layers {first}..{end - 1}, {devices} device{several}{again}")
    if plan.ranks < arguments.devices:
        several = "s" if plan.ranks > 1 else ""
        out.print(f"{plan.ranks} of {arguments.devices} devices are used: start {plan.ranks} rank{several}")
    report = examine(program_of(plan, profile), profile, cluster.at(plan.devices))
    out.print(str(report), markup=False, highlight=False)
    if arguments.output:
        out.print(f"written to {arguments.output}", markup=False)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    outer, each = options.load_link(arguments.link), arguments.per_host
    if (each is None) != (arguments.inside is None):
        raise ValueError("several devices on a host need both --per-host and --inside")
    if arguments.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {arguments.devices}")
    levels = [Level(arguments.devices, outer.alpha, outer.beta)]
    if each is not None:
        if each < 1 or arguments.devices % each:
            raise ValueError(f"--per-host: {arguments.devices} devices do not fill hosts of {each}")
        inner = options.load_link(arguments.inside)
        levels = [
            Level(each, inner.alpha, inner.beta),
            Level(arguments.devices // each, outer.alpha, outer.beta),
        ]
    return Cluster(tuple(levels), _memory(arguments.memory, arguments.devices))


def _memory(text: str | None, devices: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = [_bytes(word) for word in text.split(",")]
    return tuple(sizes * devices if len(sizes) == 1 else sizes)


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"--memory: cannot read {text!r}; write bytes, or a number with k, m, g or t (x 1024)"
        )
    return int(float(match["number"]) * 1024 ** _UNITS[match["unit"].lower()])
