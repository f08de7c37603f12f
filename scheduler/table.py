"""How near the policies come to the lower bound, over the shipped profiles: ``python -m scheduler.table``.

Prints one Markdown table for each profile, of periods as multiples of the lower bound, and says which goals
are missed. The exit status is 1 if one is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler import policies, profiles
from scheduler.bounds import lower_bound, startup_bound
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.simulate.simulator import simulate

RATIOS = (0.1, 0.3, 0.7, 1.0, 1.5, 3.0, 10.0)
"""Seconds that all bytes take on the link, RS and AG, for each second of compute."""

STARTUPS = (0.0, 20e-6, 200e-6)
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Cell:
    """One profile on one link. ``ratios`` are periods over the lower bound, by policy."""

    profile: str
    ratio: float
    startup: float
    ratios: dict[str, float]
    startup_bound: float
    buckets: int

    @property
    def goal(self) -> float | None:
        """The ratio that ``optimal`` is to reach here; None without a goal."""
        if self.startup == 0:
            return 1.02
        return 1.05 if self.ratio <= 1.5 else None

    def misses(self) -> Iterator[str]:
        ratio = self.ratios["optimal"]
        where = f"{self.profile}, ratio {self.ratio:g}, start-up {self.startup * 1e6:g} us"
        if self.goal is not None and ratio > self.goal:
            yield f"{where}: optimal is at {ratio:.4f} of the bound, not within {self.goal}"
        for name, other in self.ratios.items():
            if ratio > other * ROUNDING:
                yield f"{where}: optimal is at {ratio:.6f} of the bound, {name} at {other:.6f}"


def measure(profile: Profile, ratio: float, startup: float) -> Cell:
    link = Link(startup, ratio * profile.compute / (2 * profile.total_bytes))
    bound = lower_bound(profile, link)
    plans = {name: policies.plan(profile, link, name) for name in policies.names()}
    return Cell(
        profile.name,
        ratio,
        startup,
        {name: simulate(plan, profile, link).period / bound for name, plan in plans.items()},
        startup_bound(profile, link) / bound,
        len(plans["optimal"].buckets),
    )


def rows_of(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the names of the columns and a row for each cell."""
    names = list(cells[0].ratios)
    rows = [["profile", "ratio", "startup_us", *names, "startup_bound", "buckets"]]
    for cell in cells:
        figures = [f"{cell.ratios[name]:.4f}" for name in names]
        place = [cell.profile, f"{cell.ratio:g}", f"{cell.startup * 1e6:g}"]
        rows.append([*place, *figures, f"{cell.startup_bound:.4f}", str(cell.buckets)])
    return rows


def markdown(cells: Sequence[Cell]) -> str:
    head, *rows = rows_of(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---:"] * len(head), *rows])


def write_csv(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a table; lines that start with # above an older one say how to draw it, and stay."""
    older = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in older if line.startswith("#")]
    path.write_text("\n".join([*kept, *map(",".join, rows), ""]))


def run(names: Iterable[str], ratios: Sequence[float], startups: Sequence[float]) -> list[Cell]:
    """Prints a table for each profile as soon as it is complete, and returns all cells."""
    from rich.console import Console
    from rich.progress import track

    cells: list[Cell] = []
    for name in names:
        profile = profiles.find(name)
        links = [(ratio, startup) for ratio in ratios for startup in startups]
        # On standard error, so that the tables can be kept in a file.
        shown = track(links, profile.name, console=Console(stderr=True), transient=True)
        mine = [measure(profile, ratio, startup) for ratio, startup in shown]
        print(f"{markdown(mine)}\n")
        cells += mine
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scheduler.table", description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", nargs="*", help="shipped names or files (default: all shipped ones)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--startups", type=float, nargs="+", default=STARTUPS, help="seconds")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all cells here, as one table")
    options = parser.parse_args(arguments)
    try:
        cells = run(options.profiles or profiles.names(), options.ratios, options.startups)
    except ValueError as error:
        print(f"scheduler.table: {error}", file=sys.stderr)
        return 2
    if options.csv:
        write_csv(options.csv, rows_of(cells))
    missed = [text for cell in cells for text in cell.misses()]
    worst = max(cells, key=lambda cell: cell.ratios["optimal"])
    print(
        f"{len(cells)} cells, {len(missed)} goals missed; the worst is {worst.ratios['optimal']:.4f} of the"
        f" bound: {worst.profile}, ratio {worst.ratio:g}, start-up {worst.startup * 1e6:g} us."
    )
    for text in missed:
        print(f"- missed: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
