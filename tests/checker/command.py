"""What the checkers of pipelines and of tiles have in common: their command, and ranks that are processes."""

from __future__ import annotations

import argparse
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch

from tests.checker.seeds import run_in_processes


def reason_of(error: BaseException) -> str:
    """Return an error as a failure's text: its first line, then where it was raised."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}\n{''.join(traceback.format_exception(error)[-3:])[:3000]}"


def main(
    description: str | None, name: str, draw: Callable[[int], Any], failure: Callable[[Any], str]
) -> int:
    """Draw programs of the checker ``name``, run them and print those that fail; return the exit code."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="failures to print whole")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="run the programs that take N ranks on N processes (default: all, on threads)",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = map(draw, count(given.seed))
    if given.ranks is None:
        outcomes = ((case, failure(case)) for case in islice(cases, given.programs))
    else:
        chosen = list(islice((case for case in cases if case.size == given.ranks), given.programs))
        outcomes = run_in_processes(name, chosen, given.ranks)
    return report(outcomes, given.programs, given.seed, given.show)


def report(outcomes: Iterator[tuple[Any, str]], programs: int, seed: int, show: int) -> int:
    """Print the programs that failed, and how many; return the exit code."""
    start, failed = time.monotonic(), 0
    for done, (case, reason) in enumerate(outcomes, 1):
        if reason:
            failed += 1
            print(f"{case}\n{reason}\n" if failed <= show else f"seed {case.seed}: {reason.splitlines()[0]}")
        if done % 50 == 0:
            print(f"{done} programs, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{programs} programs from seed {seed}, {failed} failed")
    return int(failed > 0)
