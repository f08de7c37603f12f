"""The step of the shipped models on many hosts, by algorithm: ``python -m scheduler.many_hosts``.

Prints a table of milliseconds. Each algorithm runs the plan that ``optimal`` finds for its link. ``bound``:
the lower bound of two tiers, which move the fewest bytes between hosts, without start-ups.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from scheduler import policies, profiles
from scheduler.bounds import lower_bound
from scheduler.ir.link import Level, Link, network_link
from scheduler.ir.profile import Profile
from scheduler.simulate.simulator import simulate
from scheduler.table import write_csv

HOSTS = tuple(4 << step for step in range(9))
PER_HOST = (1, 2, 4, 8)
LINKS = ("10gbe", "25gbe", "100gbe")
INSIDE = Link(alpha=2e-5, beta=1e-10)  # memory that the ranks of a host share
# Seconds of a rank for each message beyond the first. No incast, and no switch is a bottleneck.
OVERHEAD = 1e-5
ALGORITHMS = ("direct", "ring", "tiers", "halving")
COLUMNS = ("link", "model", "per_host", "hosts", *ALGORITHMS, "bound")


def row_of(profile: Profile, link: str, per_host: int, hosts: int) -> list[str]:
    """Return one row of the table; ``link``: the speed of a host's card."""
    card, ranks, seconds = Link.parse(link), per_host * hosts, []
    wires = Level(per_host, INSIDE.alpha, INSIDE.beta), Level(hosts, card.alpha, card.beta, OVERHEAD)
    for algorithm in ALGORITHMS:
        cost = network_link(wires, algorithm)
        program = policies.plan(profile, cost, "optimal", ranks=ranks, budget=20_000)  # a small search
        seconds.append(simulate(program, profile, cost).period)
    seconds.append(lower_bound(profile, network_link(wires, "tiers")))
    return [link, profile.name, str(per_host), str(hosts), *(f"{1e3 * value:.1f}" for value in seconds)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scheduler.many_hosts", description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", nargs="*", help="shipped names or files (default: all shipped ones)")
    parser.add_argument("--links", nargs="+", default=LINKS, help="speeds of the hosts' cards")
    parser.add_argument("--per-host", type=int, nargs="+", default=PER_HOST, help="ranks of a host")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table here")
    options = parser.parse_args(arguments)
    rows = [list(COLUMNS)]
    print(",".join(COLUMNS))
    try:
        models = [profiles.find(name) for name in options.profiles or profiles.names()]
        for link, profile, *cluster in product(options.links, models, options.per_host, options.hosts):
            rows.append(row_of(profile, link, *cluster))
            print(",".join(rows[-1]), flush=True)
    except ValueError as error:
        print(f"scheduler.many_hosts: {error}", file=sys.stderr)
        return 2
    if options.csv:
        write_csv(options.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
