"""Make a plan for one model on one link: the buckets and the order of their collectives."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsched.cli import options
from commsched.cli.output import console, plan_table
from scheduler import policies, profiles
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_step(parser)
    add = parser.add_argument
    add("--policy", default="optimal", help=f"one of {', '.join(policies.names())}")
    options.add_ranks(parser)
    add("--output", "-o", metavar="FILE", help="write the plan to FILE, for `commsched show` and training")
    add("--json", action="store_true", help="print the plan as JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    profile = profiles.find(arguments.profile)
    link, ranks = options.cluster(arguments, arguments.ranks)
    program = policies.plan(profile, link, arguments.policy, ranks=ranks, **options.step(arguments))
    validate(program, profile)
    result = simulate(program, profile, link)
    program = program.with_meta(
        profile=profile.name, link=str(link), period=result.period, exposed=result.exposed
    )
    if arguments.output:
        program.save(Path(arguments.output))
    if arguments.json:
        print(json.dumps(program.to_dict(), indent=1))
        return
    out = console()
    out.print(plan_table(program))
    out.print(program.plan, markup=False, highlight=False)
    out.print(f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms")
    if arguments.output:
        out.print(f"written to {arguments.output}", markup=False)
