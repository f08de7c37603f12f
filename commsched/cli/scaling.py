"""Scaling tables: the same model and the same links, simulated for a growing number of ranks."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commsched.cli import options
from commsched.cli.output import console, figures, milliseconds, table
from scheduler import policies
from scheduler.bounds import lower_bound
from scheduler.ir.profile import Profile
from scheduler.simulate.simulator import simulate

MOST_RANKS = 1_000_000
SEARCH = {"optimal": {"budget": 20_000}}
"""A smaller search than usual for each row of a table; its period is within a fraction of a percent."""


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of ranks of ``8`` (one) or ``2..16384`` (2, 4, 8, ... and 16384)."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"--ranks: expected a number or A..B, got {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= MOST_RANKS:
        raise ValueError(f"--ranks: expected 1 <= A <= B <= {MOST_RANKS}, got {text!r}")
    counts = []
    while first < last:
        counts.append(first)
        first *= 2
    return [*counts, last]


def run(arguments: argparse.Namespace, profile: Profile, names: Sequence[str], counts: Sequence[int]) -> None:
    if arguments.jitter:
        raise ValueError(
            "--jitter needs a simulation of every rank, and a scaling table simulates one; give one number of"
            " ranks"
        )
    rows = [measure(arguments, profile, names, ranks) for ranks in counts]
    if arguments.plot:
        plot(rows, profile, arguments.plot)
    if arguments.json:
        print(json.dumps({"profile": profile.name, "compute": profile.compute, "scaling": rows}))
        return
    title = f"{profile.name}, {arguments.algorithm}, {arguments.link} per rank: period (ms)"
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
    step = options.step(arguments)
    bound = lower_bound(profile, link, ranks=ranks, **step)
    results: dict[str, Any] = {}
    for name in names:
        program = policies.plan(profile, link, name, ranks=ranks, **step, **SEARCH.get(name, {}))
        result = simulate(program, profile, link, slowdown=arguments.slowdown)
        results[program.policy] = {
            **figures(result, bound),
            "efficiency": profile.compute / result.period if result.period else 1.0,
        }
    return {
        "ranks": ranks,
        "link": {"alpha": link.alpha, "beta": link.beta},
        "bound": bound,
        "policies": results,
    }


def plot(rows: Sequence[dict[str, Any]], profile: Profile, file: str) -> None:
    """Draw the efficiency by number of ranks, one line per policy."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install commsched[bench]") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    ranks = [row["ranks"] for row in rows]
    for name in rows[0]["policies"]:
        axes.plot(ranks, [row["policies"][name]["efficiency"] for row in rows], marker="o", label=name)
    axes.plot(
        ranks, [profile.compute / row["bound"] if row["bound"] else 1.0 for row in rows], "k--", label="bound"
    )
    axes.set(xscale="log", xlabel="ranks", ylabel="compute / period", title=profile.name, ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(Path(file))
