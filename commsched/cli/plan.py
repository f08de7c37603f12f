"""``commsched plan`` and ``commsched show``: make a plan for one model on one link; print or draw it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commsched.cli import options
from commsched.cli.options import console, plan_table
from scheduler import policies, profiles
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.render import chrome_trace, gantt, svg
from scheduler.simulate.costs import peak_memory
from scheduler.simulate.simulator import Result, simulate
from scheduler.validate import validate

if TYPE_CHECKING:
    from commsched.cli.plan_check import Certificate

CHECK = "print every wait that the plan needs on a GPU's streams, as torch's race detector finds them"

# -- plan: the buckets and the order of their collectives ----------------------------------------------------


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_profile_and_link(parser)
    options.add_step(parser)
    add = parser.add_argument
    add("--policy", default="optimal", help=f"one of {', '.join(policies.names())}")
    options.add_ranks(parser)
    add("--output", "-o", metavar="FILE", help="write the plan to FILE, for `commsched show` and training")
    add("--json", action="store_true", help="print the plan as JSON instead of a table")
    add("--check", action="store_true", help=CHECK)


def run_plan(arguments: argparse.Namespace) -> int:
    profile = profiles.find(arguments.profile)
    link, ranks = options.cluster(arguments, arguments.ranks)
    program = policies.plan(profile, link, arguments.policy, ranks=ranks, **options.step_options(arguments))
    validate(program, profile)
    result = simulate(program, profile, link)
    found = {"profile": profile.name, "link": str(link), "period": result.period, "exposed": result.exposed}
    program = replace(program, meta={**program.meta, **found})
    if arguments.output:
        program.save(Path(arguments.output))
    certificate = _certificate(arguments, program, profile)
    status = int(certificate is not None and not certificate.holds)
    if arguments.json:
        extra = {} if certificate is None else {"check": certificate.to_dict()}
        print(json.dumps({**program.to_dict(), **extra}, indent=1))
        return status
    out = console()
    out.print(plan_table(program))
    out.print(program.plan, markup=False, highlight=False)
    out.print(f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms")
    if certificate is not None:
        print(certificate)
    if arguments.output:
        out.print(f"written to {arguments.output}", markup=False)
    return status


def _certificate(
    arguments: argparse.Namespace, program: Program, profile: Profile | None
) -> Certificate | None:
    if not arguments.check:
        return None
    from commsched.cli.plan_check import check

    return check(program, [] if profile is None else [layer.name for layer in profile.layers])


# -- show a plan: its buckets and order; with a profile and a link, its timeline as text, SVG or a trace -----

FORMATS = ("text", "svg", "chrome", "json")


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("plan", metavar="PLAN", help="file that `commsched plan --output` wrote")
    options.add_profile_and_link(parser, required=False)
    options.add_ranks(parser)
    text = "output format; svg and chrome need --profile and --link"
    add("--format", choices=FORMATS, default="text", help=text)
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    add("--output", "-o", metavar="FILE", help="write to FILE instead of the terminal")
    add("--width", type=int, default=100, help="columns of the text chart")
    add("--check", action="store_true", help=CHECK)


def run_show(arguments: argparse.Namespace) -> int:
    program = Program.load(arguments.plan)
    if arguments.check and arguments.format != "text":
        raise ValueError(f"--check prints text, got --format {arguments.format}")
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
    certificate = _certificate(arguments, program, profile)
    if certificate is None:
        return 0
    print(certificate)
    return int(not certificate.holds)


def _simulate(arguments: argparse.Namespace, program: Program, profile: Profile | None) -> Result | None:
    if profile is None and arguments.link is not None:
        raise ValueError("--link is for a timeline, which needs --profile, too")
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
        return f"{program.plan}\n" if arguments.output else ""  # the terminal shows it already
    if arguments.format == "svg":
        return svg(result, f"{program.policy} on {profile.name}")
    if arguments.format == "chrome":
        return json.dumps(chrome_trace(result, f"{program.policy} on {profile.name}")) + "\n"
    summary = (
        f"period {result.period * 1e3:.3f} ms, exposed {result.exposed * 1e3:.3f} ms, link busy"
        f" {result.link_utilisation:.1%}, peak memory {peak_memory(program, profile) / 2**20:.1f} MiB\n"
    )
    return gantt(result, arguments.width) + summary
