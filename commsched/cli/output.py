"""Tables and numbers for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from scheduler.ir.program import Program
from scheduler.simulate.simulator import Result

_PIPE_WIDTH = 160


def console() -> Console:
    # A pipe has no width, and the 80 columns that Rich assumes would cut numbers off.
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is text, and whose other columns are numbers."""
    result = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def figures(result: Result, bound: float) -> dict[str, float | None]:
    """Return a simulated step beside its lower bound, for JSON; the ratio to a bound of 0 is None."""
    ratio = result.period / bound if bound else None if result.period else 1.0
    return {"period": result.period, "ratio_to_bound": ratio, "exposed": result.exposed}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def plan_table(program: Program) -> Table:
    """Return a table of the plan's buckets."""
    rows = []
    for number, bucket in enumerate(program.buckets):
        first, last = bucket.layers[0], bucket.layers[-1]
        layers = str(first) if first == last else f"{first}..{last}"
        rows.append([str(number), f"{bucket.bytes:,}", layers, str(len(bucket.pieces)), str(bucket.group)])
    title = (
        f"{program.policy}: {program.layers} layers, {program.ranks} ranks, gathers {program.gather}"
        f"{', early step' if program.early_step else ''}, hash {program.hash}"
    )
    return table(title, ["bucket", "bytes", "layers", "pieces", "group"], rows)
