"""Writes a plan as PipeDream's and AshPipe's files (gpus=N.txt, hybrid_conf.json), or reads these."""

from __future__ import annotations

import argparse

from commsched.cli import options
from commsched.cli.output import console
from scheduler.formats.graph_txt import Graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.cluster import Cluster
from scheduler.pipelines.planner.convert import expecting, read_plan, write_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="of `commsched partition`: write AshPipe's files")
    source.add_argument("--conf", metavar="FILE", help="a hybrid_conf.json: write a plan; with --graph")
    parser.add_argument(
        "--profile",
        metavar="P",
        help="with --plan: what was partitioned (.json, graph.txt or a shipped name)",
    )
    parser.add_argument("--graph", metavar="FILE", help="with --conf: the partitioned graph, gpus=N.txt")
    parser.add_argument(
        "--link",
        metavar="L",
        help="with --conf: simulate what the plan takes, with such wires between devices",
    )
    parser.add_argument(
        "--schedule", help="with --conf: run the stages by this schedule (default: the file's, or ashpipe)"
    )
    parser.add_argument(
        "--output",
        "-o",
        required=True,
        metavar="PATH",
        help="the folder of the two files, or the plan's file",
    )


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    out = console()
    if arguments.plan:
        plan = PipelinePlan.load(arguments.plan)
        for path in write_files(plan, _graph(arguments.profile), arguments.output):
            out.print(f"written to {path}", markup=False, highlight=False)
        return
    own = {"schedule": arguments.schedule} if arguments.schedule else {}
    plan = read_plan(arguments.conf, arguments.graph, **own)
    if arguments.link:
        wires = Cluster.flat(max(plan.devices) + 1, options.load_link(arguments.link))
        plan = expecting(plan, Graph.load(arguments.graph).profile(plan.model), wires)
    plan.save(arguments.output)
    out.print(f"written to {arguments.output}", markup=False, highlight=False)


def _check(arguments: argparse.Namespace) -> None:
    allowed = ("profile",) if arguments.plan else ("graph", "link", "schedule")
    needed = allowed[0]
    source = "--plan" if arguments.plan else "--conf"
    if getattr(arguments, needed) is None:
        raise ValueError(f"{source} needs --{needed}: the other file does not say which layers there are")
    for name in ("profile", "graph", "link", "schedule"):
        if name not in allowed and getattr(arguments, name) is not None:
            raise ValueError(f"--{name} does not belong to {source}")


def _graph(text: str) -> Graph:
    """The profile's own graph where it has one, else a chain of its layers."""
    return Graph.load(text) if text.endswith(".txt") else Graph.chain(options.load_profile(text))
