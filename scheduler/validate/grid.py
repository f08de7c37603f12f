"""The kernel of a program as a table, with the actions of a violation marked."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.ir.actions import Action
from scheduler.ir.program import Program

_AROUND = 4
_RANKS = 8


def grid(program: Program, marked: Iterable[tuple[int, str, int]] = ()) -> str:
    """The kernel as a table with a row per rank and lane; marked actions are written ``>action<``.

    Long rows show only the part around their first mark; of many ranks, only those with marks are shown.
    """
    marks = set(marked)
    ranks = sorted({rank for rank, _, _ in marks}) or range(len(program.kernel))
    rows: list[tuple[str, str]] = []
    for rank in list(ranks)[:_RANKS]:
        for lane, actions in program.kernel[rank].items():
            here = [place[2] for place in marks if place[:2] == (rank, lane)]
            if here or not marks:
                rows.append((f"rank {rank} {lane}", _row(rank, lane, actions, marks, min(here, default=0))))
    width = max((len(head) for head, _ in rows), default=0)
    return "".join(f"  {head:<{width}} | {row}\n" for head, row in rows)


def _row(
    rank: int, lane: str, actions: tuple[Action, ...], marks: set[tuple[int, str, int]], centre: int
) -> str:
    first, last = max(0, centre - _AROUND), min(len(actions), centre + 3 * _AROUND + 1)
    cells = ["..."] if first else []
    for position in range(first, last):
        text = str(actions[position])
        cells.append(f">{text}<" if (rank, lane, position) in marks else text)
    return " ".join([*cells, "..."] if last < len(actions) else cells)
