"""Shows the progress of comparisons on standard error: bars on a terminal, otherwise lines."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def bars(width: int) -> Progress:
    """Bars whose descriptions have this width; invisible where standard error is no terminal."""
    errors = Console(stderr=True)
    columns = (
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


class Watcher:
    """Gets the steps of a comparison; `total` is their number, `more` a further try of the last one."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.total, self.done = progress, 0, 0
        self.task = progress.add_task("starting", total=None)

    def begin(self, total: int) -> None:
        self.total, self.done = total, 0
        self.progress.reset(self.task, total=total)

    def step(self, what: str) -> None:
        self.done += 1
        self.more(what)

    def more(self, what: str) -> None:
        # A step is announced when it begins.
        self.progress.update(self.task, completed=self.done - 1, description=what)
        if not self.progress.console.is_terminal:
            print(f"[{self.done}/{self.total}] {what}", file=sys.stderr, flush=True)
