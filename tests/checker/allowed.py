"""The errors that may end an ordinary action. Nothing else may be raised where plain PyTorch goes on.

``docs/exactness.md`` has the same rows for users; ``test_random_programs.py`` holds both together, and raises
each of them.
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

    ``events``: what the user does: "read" a gradient, read another one "inside" a backward, "clear" all, run
    a "backward", or one "backward again" before a step, "step", "synchronize", take the optimizer's "state",
    or the "values" of parameters, change "settings", or "step with other settings" than the backward began
    with. ``when``: in which state of the optimizer. ``says``: what the text contains, of the rule and of the
    way out. ``sure``: whether that event is always refused in that state; programs avoid it then, with few
    exceptions.
    ``goes_on``: whether a script may catch the error where it reads gradients, and go on: nothing changed.
    """

    name: str
    events: tuple[str, ...]
    when: Callable[[Book], bool]
    error: tuple[type[BaseException], ...]
    says: tuple[str, ...]
    sure: bool = True
    goes_on: bool = False

    def permits(self, error: BaseException) -> bool:
        text = str(error)
        return isinstance(error, self.error) and all(part in text for part in self.says)


USES = ("read", "backward", "step", "synchronize", "state")
SHARDS = "gather='parameters'"

ROWS = (
    Row(
        "not gathered",
        ("read",),
        lambda book: book.ungathered,
        (CommError,),
        (SHARDS, "synchronize()"),
        goes_on=True,
    ),
    Row(
        "gradient gone",
        ("read", "backward", "step", "synchronize"),
        lambda book: book.consumed,
        (CommError, ValueError),
        (SHARDS, "step() leaves", "zero_grad()"),
        goes_on=True,
    ),
    Row(
        "second gradient",
        USES,
        lambda book: book.late,
        (CommError,),
        ("second gradient", "use_reentrant=False"),
        sure=False,
        goes_on=True,
    ),
    Row(
        "converted",
        USES,
        lambda book: book.converted,
        (ValueError,),
        (SHARDS, "another type", "close()"),
    ),
    Row(
        "early step",
        ("synchronize", "backward again"),
        lambda book: book.early,
        (ValueError,),
        ("early_step=True",),
    ),
    Row(
        "early step",
        ("clear", "read", "values", "state", "settings", "step with other settings"),
        lambda book: book.early and (book.backwards > 0 or book.raised),
        (ValueError,),
        ("early_step=True",),
    ),
    Row(
        "sum changed",
        ("backward", "step", "synchronize"),
        lambda book: book.changed,
        (ValueError,),
        ("op=Sum", "zero_grad()"),
    ),
    Row(
        "backward raised",
        USES,
        lambda book: book.raised,
        (ValueError,),
        ("raised", "clear", "zero_grad()"),
    ),
    Row(
        "inside its backward",
        ("inside",),
        lambda book: True,
        (ValueError,),
        ("inside of the backward", "after the backward"),
        sure=False,
    ),
    Row(
        "closed",
        ("step", "synchronize"),
        lambda book: book.closed,
        (CommError,),
        ("closed", "wrap the optimizer again"),
    ),
)


def rows_for(event: str, book: Book) -> list[Row]:
    """Return the errors that this event may end with in this state of the optimizer."""
    return [row for row in ROWS if event in row.events and row.when(book)]


def permitted(error: BaseException, names: set[str]) -> Row | None:
    """Return the row by which this error is allowed, if there is one among these names."""
    return next((row for row in ROWS if row.name in names and row.permits(error)), None)
