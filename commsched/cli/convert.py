"""Write a plan as PipeDream's and AshPipe's files (gpus=N.txt, hybrid_conf.json), or read such files."""

from __future__ import annotations

import argparse

from commsched.cli import options
from commsched.cli.output import console
from scheduler import profiles
from scheduler.formats.pipedream import Graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.link import Cluster
from scheduler.pipelines.convert import expecting, read_plan, write_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="plan to write as AshPipe's files")
    source.add_argument("--conf", metavar="FILE", help="hybrid_conf.json, to write as a plan; with --graph")
    add = parser.add_argument
    add(
        "--profile",
        metavar="P",
        help="with --plan: the profile that was partitioned, as a file (.json, graph.txt) or a shipped name",
    )
    add("--graph", metavar="FILE", help="with --conf: the partitioned graph (gpus=N.txt)")
    add(
        "--link",
        metavar="L",
        help="with --conf: record the step time that a simulation expects over such links between devices",
    )
    add("--schedule", help="with --conf: schedule of the plan (default: the one in the file, else ashpipe)")
    add(
        "--output",
        "-o",
        required=True,
        metavar="PATH",
        help="with --plan: folder for the two files; with --conf: file for the plan",
    )


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
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
        cluster = Cluster.flat(max(plan.devices) + 1, options.load_link(arguments.link))
        plan = expecting(plan, Graph.load(arguments.graph).profile(plan.model), cluster)
    plan.save(arguments.output)
    out.print(f"written to {arguments.output}", markup=False, highlight=False)


def _check(arguments: argparse.Namespace) -> None:
    allowed = ("profile",) if arguments.plan else ("graph", "link", "schedule")
    needed = allowed[0]
    source = "--plan" if arguments.plan else "--conf"
    if getattr(arguments, needed) is None:
        raise ValueError(f"{source} needs --{needed}: the other file does not list the layers")
    for name in ("profile", "graph", "link", "schedule"):
        if name not in allowed and getattr(arguments, name) is not None:
            raise ValueError(f"--{name} does not belong to {source}; leave it out")
