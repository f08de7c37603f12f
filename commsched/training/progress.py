"""A progress bar on a terminal; silent where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str], None]


@contextmanager
def progress(label: str, total: int, done: int, shown: bool) -> Iterator[Advance]:
    """Yields a function to call after each step, with a text to show."""
    if not shown or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, completed=done, text="")
        yield lambda text: bar.update(task, advance=1, text=text)
