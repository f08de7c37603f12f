"""The errors that a program of ordinary actions may end with. Nothing else may be raised where plain PyTorch goes on.

Each row says when its error may be raised, which type it has, what its text must contain, and whether a script
that catches it may go on. ``docs/exactness.md`` has the same rows for users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commsched.errors import CommError

if TYPE_CHECKING:
    from tests.checker.plain import Book


@dataclass(frozen=True)
class Row:
    """One listed error.

    ``event``: what the user does ("read" a gradient, "backward", "step", "synchronize", "wrap", ...).
    ``when``: in which state of the optimizer. ``says``: the rule, and the way out.
    """

    name: str
    events: tuple[str, ...]
    when: Callable[[Book], bool]
    error: type[BaseException]
    says: tuple[str, ...]
    goes_on: bool = False  # whether the script may catch it and go on, because nothing has changed

    def permits(self, error: BaseException) -> bool:
        text = str(error)
        return isinstance(error, self.error) and all(part in text for part in self.says)


ROWS = (
    Row(
        "not gathered",
        ("read",),
        lambda book: book.ungathered,
        CommError,
        ("gather='parameters'", "synchronize()"),
        goes_on=True,
    ),
    Row(
        "gradient gone",
        ("read",),
        lambda book: book.consumed,
        CommError,
        ("gather='parameters'", "gone", "synchronize()"),
        goes_on=True,
    ),
    Row(
        "ScriptModule",
        ("wrap a ScriptModule",),
        lambda book: True,
        ValueError,
        ("ScriptModule",),
    ),
    Row(
        "second gradient",
        ("read", "backward", "step", "synchronize"),
        lambda book: book.late,
        CommError,
        ("second gradient", "use_reentrant=False"),
    ),
    Row(
        "nothing left to add to",
        ("backward", "step", "synchronize"),
        lambda book: book.consumed,
        ValueError,
        ("gather='parameters'", "zero_grad()"),
    ),
    Row(
        "sum changed",
        ("backward", "step", "synchronize"),
        lambda book: book.changed,
        ValueError,
        ("op=Sum", "zero_grad()"),
    ),
    Row(
        "backward raised",
        ("read", "backward", "step", "synchronize"),
        lambda book: book.raised,
        ValueError,
        ("raised", "clear", "zero_grad()"),
    ),
    Row(
        "closed",
        ("step", "synchronize", "backward"),
        lambda book: book.closed,
        CommError,
        ("close",),
    ),
)


def rows_for(event: str, book: Book) -> set[str]:
    return {row.name for row in ROWS if event in row.events and row.when(book)}


def permitted(error: BaseException, names: set[str]) -> Row | None:
    """Return the row by which this error is allowed, if there is one among these names."""
    return next((row for row in ROWS if row.name in names and row.permits(error)), None)
