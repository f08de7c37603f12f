"""Show a plan: its buckets and order; with a profile and a link, its timeline as text, SVG or a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsched.cli import options
from commsched.cli.output import console, plan_table
from scheduler import profiles
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.render import chrome_trace, gantt, svg
from scheduler.simulate.costs import peak_memory
from scheduler.simulate.simulator import Result, simulate
from scheduler.validate import validate

FORMATS = ("text", "svg", "chrome", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="file that `commsched plan --output` wrote")
    options.add_model(parser, required=False)
    options.add_ranks(parser)
    add(
        "--format",
        choices=FORMATS,
        default="text",
        help="output format; svg and chrome need --profile and --link",
    )
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    add("--output", "-o", metavar="FILE", help="write to FILE instead of the terminal")
    add("--width", type=int, default=100, help="columns of the text chart")


def run(arguments: argparse.Namespace) -> None:
    program = Program.load(arguments.plan)
    profile = profiles.find(arguments.profile) if arguments.profile else None
    validate(program, profile)
    result = _simulate(arguments, program, profile)
    if arguments.format == "text" and not arguments.output:
        out = console()
        out.print(plan_table(program))
        out.print(program.plan, markup=False, highlight=False)
    text = _render(arguments, program, profile, result)
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text, end="")


def _simulate(arguments: argparse.Namespace, program: Program, profile: Profile | None) -> Result | None:
    if profile is None or arguments.link is None:
        if arguments.format in ("svg", "chrome"):
            raise ValueError(
                f"--format {arguments.format} draws a timeline, which needs --profile and --link"
            )
        return None
    link, _ = options.cluster(arguments, arguments.ranks)
    return simulate(program, profile, link)


def _render(
    arguments: argparse.Namespace, program: Program, profile: Profile | None, result: Result | None
) -> str:
    if arguments.format == "json":
        report = {**program.to_dict(), "hash": program.hash, "plan": program.plan}
        if result is not None:
            report["simulated"] = result.to_dict()
        return json.dumps(report, indent=1) + "\n"
    if result is None or profile is None:
        return ""
    if arguments.format == "svg":
        return svg(result, title=f"{program.policy} on {profile.name}")
    if arguments.format == "chrome":
        return json.dumps(chrome_trace(result, f"{program.policy} on {profile.name}")) + "\n"
    summary = (
        f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms, link busy"
        f" {result.link_utilisation:.1%}, peak memory {peak_memory(program, profile) / 2**20:.1f} MiB\n"
    )
    return gantt(result, arguments.width) + summary
