"""What rules are made of: violations, places in a kernel and their picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.ir.actions import Action
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program

Place = tuple[int, str, int]
"""Rank, lane and position of an action in a kernel."""

_AROUND = 4
_RANKS = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: what is wrong, and where."""

    rule: str
    message: str
    places: frozenset[Place] = frozenset()


Rule = Callable[[Program, Profile | None], Iterator[Violation]]
RuleSet = Sequence[Sequence[Rule]]
"""Groups of rules. Rule groups after the first failing one are skipped, because their rules rely on it."""


class InvalidProgram(ValueError):
    """A program that breaks a rule. ``violations`` holds all that were found; the message shows them."""

    def __init__(self, program: Program, found: list[Violation]) -> None:
        self.violations = found
        shown = [f"{each.message}\n{grid(program, each.places)}" for each in found]
        super().__init__("\n".join(shown).rstrip())


def placed(program: Program, rank: int, only: str | None = None) -> Iterator[tuple[Place, Action]]:
    """The actions of a rank (or of one of its lanes) with their places."""
    for lane, actions in program.kernel[rank].items():
        if only is None or lane == only:
            for number, action in enumerate(actions):
                yield (rank, lane, number), action


def violation(rule: str, message: str, *places: Place) -> Violation:
    return Violation(rule, message, frozenset(places))


def grid(program: Program, marked: Iterable[Place] = ()) -> str:
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


def _row(rank: int, lane: str, actions: tuple[Action, ...], marks: set[Place], centre: int) -> str:
    first, last = max(0, centre - _AROUND), min(len(actions), centre + 3 * _AROUND + 1)
    cells = ["..."] if first else []
    for position in range(first, last):
        text = str(actions[position])
        cells.append(f">{text}<" if (rank, lane, position) in marks else text)
    return " ".join([*cells, "..."] if last < len(actions) else cells)
