"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from typing import Any

from scheduler import policies, profiles
from scheduler.ir.link import ALGORITHMS, Level, Link, Network
from scheduler.ir.profile import Profile

DEFAULT_RANKS = 2
ALL_REDUCE_POLICIES = ("wfbp", "mgwfbp", "bytescheduler")
"""Policies without a place between RS and AG, where shards could be updated."""


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--profile",
        required=required,
        metavar="P",
        help=f"a profile's file (.json or graph.txt) or one of: {', '.join(profiles.names())}",
    )
    parser.add_argument(
        "--link",
        required=required,
        metavar="L",
        help="alpha=SECONDS,beta=SECONDS_PER_BYTE of one RS or AG, 10gbit or FILE.json; see also --ranks",
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="ring", help="of the collectives, with --ranks"
    )
    parser.add_argument(
        "--per-host", type=int, default=1, metavar="N", help="ranks that share a host's --link"
    )
    parser.add_argument("--inside", metavar="L", help="with --per-host: the wire between ranks of one host")


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gather", choices=("gradients", "parameters"), default="gradients", help="what AGs move"
    )
    parser.add_argument(
        "--early-step", action="store_true", help="with parameters: update within the backward"
    )


def load_profile(text: str) -> Profile:
    return profiles.find(text)


def load_link(text: str) -> Link:
    return Link.load(text) if text.endswith(".json") else Link.parse(text)


def cluster(arguments: argparse.Namespace, ranks: int | None) -> tuple[Link, int]:
    """The effective link and the number of ranks: the link as it is, or that of ``ranks`` ranks with such
    wires.
    """
    link = load_link(arguments.link)
    inside, each = arguments.inside, arguments.per_host
    if (each != 1) != (inside is not None) or (inside and ranks is None):
        raise ValueError("several ranks on a host need all of --ranks, --per-host and --inside")
    if ranks is None:
        return link, DEFAULT_RANKS
    if inside is None:
        return Network.flat(link, ranks, arguments.algorithm).link(), ranks
    # Fewer ranks than a host holds stay inside one.
    each = min(each, ranks)
    if each < 1 or ranks % each:
        raise ValueError(f"--per-host: {ranks} ranks do not fill hosts of {each}")
    levels = (_level(each, load_link(inside)), _level(ranks // each, link))
    return Network(levels, arguments.algorithm).link(), ranks


def _level(ranks: int, wire: Link) -> Level:
    return Level(ranks, wire.alpha, wire.beta)


def policy_names(arguments: argparse.Namespace) -> list[str]:
    """The policies asked for; by default all that can do the step."""
    if arguments.policies:
        return [name.strip() for name in arguments.policies.split(",")]
    all_reduce_only = ALL_REDUCE_POLICIES if arguments.gather == "parameters" else ()
    return [name for name in policies.names() if name not in all_reduce_only]


def step(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of policies and bounds."""
    return {"gather": arguments.gather, "early_step": arguments.early_step}
