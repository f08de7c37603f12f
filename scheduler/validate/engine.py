"""The rule engine: violations, places in a kernel, and the loop over groups of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.ir.actions import Action
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.validate.grid import grid

Place = tuple[int, str, int]
"""Rank, lane and position of an action in a kernel."""


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


def check(program: Program, profile: Profile | None, rules: RuleSet) -> list[Violation]:
    """The violations of the first group of rules that the program breaks."""
    for group in rules:
        found = [violation for rule in group for violation in rule(program, profile)]
        if found:
            return found
    return []


def placed(program: Program, rank: int, only: str | None = None) -> Iterator[tuple[Place, Action]]:
    """The actions of a rank (or of one of its lanes) with their places."""
    for lane, actions in program.kernel[rank].items():
        if only is None or lane == only:
            for number, action in enumerate(actions):
                yield (rank, lane, number), action


def violation(rule: str, message: str, *places: Place) -> Violation:
    return Violation(rule, message, frozenset(places))
