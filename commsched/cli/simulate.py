"""Compare policies on a profile and a link: period, ratio to the lower bound, exposed communication."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from commsched.cli import options
from commsched.cli.options import console, figures, milliseconds, table
from scheduler import policies, profiles
from scheduler.bounds import lower_bound
from scheduler.ir.buckets import Bucket
from scheduler.ir.inputs import InputError, whole
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate

LINK_FIELDS = ("alpha", "beta", "inside", "between", "overlaps", "segment")  # the last four of two tiers only
COST = "RS and AG of a bucket take alpha + beta * bytes, AR takes twice that"
COST_OF_TIERS = "; min(inside.beta, between.beta) * min(bytes, segment) is added for each RS and AG"

MOST_RANKS = 1_000_000
SEARCH = {"optimal": {"budget": 20_000}}
"""A smaller search than usual for each row of a table; its period is within a fraction of a percent."""


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_profile_and_link(parser)
    options.add_step(parser)
    add = parser.add_argument
    text = f"policies to compare (default: all that support --gather, of {', '.join(policies.names())})"
    add("--policies", metavar="A,B", help=text)
    add(
        "--ranks",
        metavar="N|A..B",
        help="number of ranks; --link is then one rank's own link, and A..B gives a scaling table (default:"
        f" {options.DEFAULT_RANKS}, with --link as the cost of a whole RS or AG)",
    )
    text = "compute takes 1+S times as long while the link is busy"
    add("--slowdown", type=float, default=0.0, metavar="S", help=text)
    add("--jitter", type=float, default=0.0, help="relative deviation of each rank's speed")
    add("--json", action="store_true", help="print one JSON object (times in seconds)")


def run_simulate(arguments: argparse.Namespace) -> None:
    profile = profiles.find(arguments.profile)
    names = policies.names(arguments.gather)
    if arguments.policies:
        names = [name.strip() for name in arguments.policies.split(",")]
    counts = parse_ranks(arguments.ranks) if arguments.ranks else [None]
    if len(counts) > 1:
        scale(arguments, profile, names, [count for count in counts if count])
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
    step, costs = options.step_options(arguments), link.to_dict()
    bound = lower_bound(profile, link, **step)
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
        "link": {name: costs[name] for name in LINK_FIELDS if name in costs}
        | {"cost": COST + COST_OF_TIERS * ("between" in costs)},
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


# -- scaling tables: the same model and the same links, simulated for a growing number of ranks --------------


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of ranks of ``8`` (one) or ``2..16384`` (2, 4, 8, ... and 16384)."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None:
        raise InputError(f"--ranks: expected a number or A..B, got {text!r}")
    first, last = (whole(part, "--ranks", MOST_RANKS) for part in (match[1], match[2] or match[1]))
    if not 1 <= first <= last:
        raise InputError(f"--ranks: expected 1 <= A <= B, got {text!r}")
    counts = []
    while first < last:
        counts.append(first)
        first *= 2
    return [*counts, last]


def scale(
    arguments: argparse.Namespace, profile: Profile, names: Sequence[str], counts: Sequence[int]
) -> None:
    if arguments.jitter:
        raise ValueError(
            "--jitter needs a simulation of every rank, and a scaling table simulates one; give one number of"
            " ranks"
        )
    rows = [measure(arguments, profile, names, ranks) for ranks in counts]
    if arguments.json:
        print(json.dumps({"profile": profile.name, "compute": profile.compute, "scaling": rows}))
        return
    title = f"{profile.name}, {arguments.algorithm or 'ring'}, {arguments.link} per rank: period (ms)"
    cells = [
        [str(row["ranks"]), *(milliseconds(result["period"]) for result in row["policies"].values())]
        + [milliseconds(row["bound"])]
        for row in rows
    ]
    console().print(table(title, ["ranks", *rows[0]["policies"], "bound"], cells))


def measure(
    arguments: argparse.Namespace, profile: Profile, names: Sequence[str], ranks: int
) -> dict[str, Any]:
    """Return one row of the table; ``efficiency`` is compute / period."""
    link, _ = options.cluster(arguments, ranks)
    step = options.step_options(arguments)
    bound = lower_bound(profile, link, **step)
    results: dict[str, Any] = {}
    for name in names:
        program = policies.plan(profile, link, name, ranks=ranks, **step, **SEARCH.get(name, {}))
        result = simulate(program, profile, link, slowdown=arguments.slowdown)
        efficiency = profile.compute / result.period if result.period else 1.0
        results[program.policy] = {**figures(result, bound), "efficiency": efficiency}
    wire = {"alpha": link.alpha, "beta": link.beta}
    return {"ranks": ranks, "link": wire, "bound": bound, "policies": results}
