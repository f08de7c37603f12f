"""Programs of the checkers of pipelines and tiles on real ranks: each rank draws them from their seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.checker import processes
from tests.checker.programs import Failure


def run_in_processes(checker: str, cases: Sequence[Any], ranks: int) -> Iterator[tuple[Any, str]]:
    """Run programs of this checker on real ranks; yield each with how it failed."""
    cases = list(cases)
    while cases:
        # Ranks of which one has stopped have not made as many pipelines: new ones would not meet.
        stopped = (number for number, case in enumerate(cases, 1) if getattr(case, "stops", None))
        together = cases[: next(stopped, len(cases))]
        described = [[checker, case.seed] for case in together]
        failures = processes.run_described(described, ranks, Path(__file__))
        for case, failure in zip(together, failures, strict=True):
            yield case, "" if failure is None else f"rank {failure.rank}: {failure.detail}"
        cases = cases[len(together) :]


def run_here(described: Any, rank: int, meet: processes.Meet) -> processes.Outcome:
    """Run a program on this rank."""
    name, seed = described
    checker = import_module(name)
    reason = checker.failure_on_rank(checker.draw(seed), rank, partial(meet, "begin"))
    moment = time.monotonic()
    with suppress(RuntimeError):  # the time-out of the store: another rank hangs
        meet("end")  # the others may need this rank until they are here
    if not reason:
        return None, False, moment
    return Failure("fails", reason.splitlines()[0], rank, 0, "", reason), False, moment


if __name__ == "__main__":
    processes.main(run_here)
