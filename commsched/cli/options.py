"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from typing import Any

from scheduler import profiles
from scheduler.ir.link import ALGORITHMS, Level, Link, network_link

DEFAULT_RANKS = 2


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    add_profile(parser, "", required)
    parser.add_argument(
        "--link",
        required=required,
        metavar="L",
        help="cost of one RS or AG (with --ranks: of one message on a rank's own link), as"
        " alpha=SECONDS,beta=SECONDS_PER_BYTE, a speed such as 10gbit, or FILE.json",
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="ring", help="with --ranks: algorithm of the collectives"
    )
    add_hosts(parser, "ranks")


def add_profile(parser: argparse.ArgumentParser, of: str, required: bool = True) -> None:
    parser.add_argument(
        "--profile",
        required=required,
        metavar="P",
        help=f"profile{of}: a file (.json or graph.txt) or one of {', '.join(profiles.names())}",
    )


def add_hosts(parser: argparse.ArgumentParser, members: str) -> None:
    parser.add_argument(
        "--per-host", type=int, metavar="N", help=f"{members} that share one host's --link (default: 1)"
    )
    parser.add_argument(
        "--inside", metavar="L", help=f"with --per-host: link between the {members} of one host"
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"number of ranks; --link is then one rank's own link (default: {DEFAULT_RANKS}, with --link"
        " as the cost of a whole RS or AG)",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gather", choices=("gradients", "parameters"), default="gradients", help="what all-gathers move"
    )
    parser.add_argument(
        "--early-step", action="store_true", help="with --gather parameters: update during the backward"
    )


def load_link(text: str) -> Link:
    return Link.load(text) if text.endswith(".json") else Link.parse(text)


def cluster(arguments: argparse.Namespace, ranks: int | None) -> tuple[Link, int]:
    """Return the cost of one RS or AG and the number of ranks.

    Without `ranks` --link is that cost; otherwise it is computed for a cluster of `ranks` such links.
    """
    if ranks is None:
        if arguments.inside is not None or (arguments.per_host or 1) != 1:
            raise ValueError("several ranks on a host need all of --ranks, --per-host and --inside")
        return load_link(arguments.link), DEFAULT_RANKS
    return network_link(levels(arguments, ranks, "ranks"), arguments.algorithm), ranks


def levels(arguments: argparse.Namespace, count: int, members: str) -> tuple[Level, ...]:
    """Return the levels of a cluster of `count` members as --link, --per-host and --inside describe it."""
    link, per_host = load_link(arguments.link), arguments.per_host
    if arguments.inside is None and (per_host or 1) == 1:
        return (Level(count, link.alpha, link.beta),)
    if per_host is None or arguments.inside is None:
        raise ValueError(f"several {members} on a host need both --per-host and --inside")
    per_host = min(per_host, count)  # fewer members than one host holds
    if per_host < 1 or count % per_host:
        raise ValueError(f"--per-host: {count} {members} do not fill hosts of {per_host}")
    inside = load_link(arguments.inside)
    return Level(per_host, inside.alpha, inside.beta), Level(count // per_host, link.alpha, link.beta)


def step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of policies and bounds."""
    return {"gather": arguments.gather, "early_step": arguments.early_step}


def cuts_of(text: str | None) -> list[int | str] | None:
    """Return the layers with which stages begin: numbers or modules' names; the first may be left out."""
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    found: list[int | str] = [int(word) if word.isdigit() else word for word in words]
    return found if found[0] == 0 or isinstance(found[0], str) else [0, *found]
