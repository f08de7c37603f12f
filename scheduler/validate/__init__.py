"""Check whether all ranks can run a program for any number of iterations.

    validate(program, profile)        # raises InvalidProgram, a ValueError that shows the actions at fault
    violations(program, profile)      # the same as a list

One engine and, for each kind of program, a set of rules.
"""

from __future__ import annotations

from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.validate import data_parallel, pipeline
from scheduler.validate.engine import InvalidProgram, Violation, grid

__all__ = ["InvalidProgram", "Violation", "grid", "validate", "violations"]


def validate(program: Program, profile: Profile | None = None) -> None:
    """Raise ``InvalidProgram`` if the program breaks a rule or, with a profile, is for another model."""
    found = violations(program, profile)
    if found:
        raise InvalidProgram(program, found)


def violations(program: Program, profile: Profile | None = None) -> list[Violation]:
    """The violations of the first group of rules that the program breaks."""
    kind = data_parallel if program.pipeline is None else pipeline
    for group in kind.RULES:
        if found := [violation for rule in group for violation in rule(program, profile)]:
            return found
    return []
