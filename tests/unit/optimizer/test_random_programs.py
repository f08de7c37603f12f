"""Random programs of ordinary actions give what plain PyTorch with averaged gradients gives (tests/checker)."""

from __future__ import annotations

import time

import pytest
import torch

from tests.checker.__main__ import warm_up
from tests.checker.programs import draw, run_on_threads, shrink

FIXED, FRESH = 1, time.time_ns() % 10**9
PARTS, PROGRAMS = 5, 50
"""Half of 500 programs have fixed seeds. pytest-xdist shares the parts between its processes."""


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    torch.set_num_threads(1)
    warm_up()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["fixed", "fresh"])
def test_random_programs(kind: str, part: int) -> None:
    first = (FIXED if kind == "fixed" else FRESH) + part * PROGRAMS
    print(f"seeds {first} to {first + PROGRAMS - 1}")
    for seed in range(first, first + PROGRAMS):
        ranks = 3 if seed % 5 == 0 else 2
        program = draw(seed, ranks)
        failure = run_on_threads(program)
        if failure is not None:
            small, reason = shrink(program, failure, lambda each: run_on_threads(each, 5.0), 30.0)
            pytest.fail(
                f"seed {seed} differs from plain PyTorch"
                f" (python -m tests.checker --ranks {ranks} --replay {seed}):\n{small}\n{reason}"
            )
