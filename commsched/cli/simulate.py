"""Compare policies on a profile and a link: period, ratio to the lower bound, exposed communication."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from commsched.cli import options, scaling
from commsched.cli.output import console, figures, milliseconds, table
from scheduler import policies, profiles
from scheduler.bounds import lower_bound
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

COST = "RS and AG of a bucket take alpha + beta * bytes, AR takes twice that"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_step(parser)
    add = parser.add_argument
    add(
        "--policies",
        metavar="A,B",
        help=f"policies to compare (default: all that support --gather, of {', '.join(policies.names())})",
    )
    add(
        "--ranks",
        metavar="N|A..B",
        help="number of ranks; --link is then one rank's own link, and A..B gives a scaling table (default:"
        f" {options.DEFAULT_RANKS}, with --link as the cost of a whole RS or AG)",
    )
    add(
        "--slowdown",
        type=float,
        default=0.0,
        metavar="S",
        help="compute takes 1+S times as long while the link is busy",
    )
    add("--jitter", type=float, default=0.0, help="relative deviation of each rank's speed")
    add("--plot", metavar="FILE", help="with --ranks A..B: draw the scaling table to FILE (.png, .svg)")
    add("--json", action="store_true", help="print one JSON object (times in seconds)")


def run(arguments: argparse.Namespace) -> None:
    profile = profiles.find(arguments.profile)
    names = policies.names(arguments.gather)
    if arguments.policies:
        names = [name.strip() for name in arguments.policies.split(",")]
    counts = scaling.parse_ranks(arguments.ranks) if arguments.ranks else [None]
    if arguments.plot and len(counts) < 2:
        raise ValueError("--plot draws a scaling table; give --ranks A..B")
    if len(counts) > 1:
        scaling.run(arguments, profile, names, [count for count in counts if count])
        return
    link, ranks = options.cluster(arguments, counts[0])
    report = compare(arguments, profile, link, ranks, names)
    if arguments.json:
        print(json.dumps(report))
        return
    compute, bound = milliseconds(report["compute"]), milliseconds(report["bound"])
    title = f"{profile.name}: compute {compute} ms, bound {bound} ms, {link}"
    rows = [
        [
            name,
            str(len(row["buckets"])),
            milliseconds(row["period"]),
            "-" if row["ratio_to_bound"] is None else f"{row['ratio_to_bound']:.3f}",
            milliseconds(row["exposed"]),
            f"{row['link_utilisation']:.1%}",
        ]
        for name, row in report["policies"].items()
    ]
    columns = ["policy", "buckets", "period ms", "period/bound", "exposed ms", "link busy"]
    console().print(table(title, columns, rows))


def compare(
    arguments: argparse.Namespace, profile: Profile, link: Link, ranks: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return all that is needed to recompute the figures: layers, link, each policy's buckets and order."""
    step = options.step(arguments)
    bound = lower_bound(profile, link, ranks=ranks, **step)
    results = {}
    quiet = not sys.stderr.isatty()
    for name in track(names, "simulating", console=Console(stderr=True), transient=True, disable=quiet):
        program = policies.plan(profile, link, name, ranks=ranks, **step)
        validate(program, profile)
        results[program.policy] = _row(program, profile, link, bound, arguments)
    return {
        "profile": profile.name,
        "source": profile.source,
        "layers": [
            {"name": layer.name, "forward": layer.forward, "backward": layer.backward, "bytes": layer.bytes}
            for layer in profile.layers
        ],
        "update_per_byte": profile.update_per_byte,
        "link": {"alpha": link.alpha, "beta": link.beta, "cost": COST},
        "ranks": ranks,
        **step,
        "compute": profile.compute,
        "bound": bound,
        "policies": results,
    }


def _row(
    program: Program, profile: Profile, link: Link, bound: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    result = simulate(program, profile, link, slowdown=arguments.slowdown, jitter=arguments.jitter)
    return {
        **figures(result, bound),
        "link_utilisation": result.link_utilisation,
        "plan": program.plan,
        "buckets": [bucket_row(bucket, profile) for bucket in program.buckets],
    }


def bucket_row(bucket: Bucket, profile: Profile) -> dict[str, Any]:
    """Describe a bucket; ``parts``: ``[layer, first byte, last byte (included)]`` of each split tensor."""
    row: dict[str, Any] = {"layers": list(bucket.layers), "bytes": bucket.bytes}
    parts = [[p.layer, p.start, p.stop - 1] for p in bucket.pieces if p.bytes < profile.layers[p.layer].bytes]
    return {**row, "parts": parts} if parts else row
