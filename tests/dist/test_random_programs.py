"""Programs that random draws have found to fail on real ranks alone, over the real transports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.processes import run_in_processes
from tests.checker.programs import PLAINEST, Program

pytestmark = pytest.mark.dist

TIED_SUMS = {"kind": "table", "tied": True, "schedule": "auto", "op": "sum", "row_sparse": True}
FOUND: list[tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = [
    # The head's part had been sent, and the whole gradient was written over it.
    (TIED_SUMS, [("train", {"loss": {}, "steps": 5, "clear": "none", "first": False})]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("transport", "ranks", "hosts"), [("direct", 2, 1), ("auto", 2, 1), ("tiers", 4, 2)])
def test_what_random_programs_have_found_on_real_ranks(transport: str, ranks: int, hosts: int) -> None:
    programs = [
        Program(
            1,
            {**PLAINEST, "processes": True, "transport": transport, "ranks": ranks, **options},
            tuple((action, salt, False, arguments) for salt, (action, arguments) in enumerate(steps)),
        )
        for options, steps in FOUND
    ]
    failures = [failure for _, failure in run_in_processes(programs, ranks, hosts)]
    assert failures == [None] * len(FOUND), failures
