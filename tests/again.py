"""Runs what the last pytest run saw fail again, alone: exits 0 only where the machine's unsteadiness did it.

A test of real processes (`dist`) that passes REPEATS times alone is reported as unsteady, with its name, and
is let pass; it is a fault to be found (tests/support/unsteady.py provokes such). Whatever else failed stays
failed: tests without processes, tests that compare results (`exact`), more than ALLOWED tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWED = 2
REPEATS = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


class Collected:
    """pytest plugin: what the named tests are marked with."""

    def __init__(self) -> None:
        self.marks: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}


def verdict(failed: list[str], marks: dict[str, set[str]]) -> str:
    """Why these failures may not be repeated, empty where they may."""
    if not failed:
        return "no test is known to have failed; something before the tests did"
    if len(failed) > ALLOWED:
        return f"{len(failed)} tests failed; at most {ALLOWED} are repeated"
    for name in failed:
        if name not in marks:
            return f"{name} can not be collected"
        if "dist" not in marks[name] or "exact" in marks[name]:
            return f"{name} does not depend on when processes get their turn"
    return ""


def main() -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    collected = Collected()
    if failed:
        pytest.main(["--collect-only", "-qq", *failed], [collected])
    reason = verdict(failed, collected.marks)
    if reason:
        print(f"not repeated: {reason}")
        return 1
    for _ in range(REPEATS):
        if subprocess.run([sys.executable, "-m", "pytest", *failed]).returncode:
            return 1
    for name in failed:
        print(f"UNSTEADY: {name} failed once and passed {REPEATS} times alone; above is how it failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
