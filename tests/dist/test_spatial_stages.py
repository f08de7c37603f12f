"""Every model on every grid, with a pipeline, with data parallelism and with mirrored replicas (GEMS)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import product

import pytest

from tests.support.launch import run_ranks
from tests.support.spatial_stages import CELLS, SCHEDULES, TAILS, Case

pytestmark = [pytest.mark.dist, pytest.mark.exact, pytest.mark.slow]
MIRRORED = (False, True)
on_every_grid = pytest.mark.parametrize(
    "grid", [(1, 4), (4, 1), (2, 2), (3, 2)], ids=lambda grid: f"{grid[0]}x{grid[1]}"
)


def run_cases() -> None:
    import json
    import os

    import torch

    import commsched as hvd
    from tests.support.spatial_stages import Case, check

    torch.set_num_threads(1)
    hvd.init()
    for fields in json.loads(os.environ["CASES"]):
        check(Case(**{**fields, "grid": tuple(fields["grid"])}))
    hvd.shutdown()


def run(cases: Iterable[Case]) -> None:
    chosen = list(cases)
    assert len({case.ranks for case in chosen}) == 1, "cases of one launch need equally many ranks"
    text = json.dumps([asdict(case) for case in chosen])
    run_ranks(run_cases, chosen[0].ranks, env={"CASES": text}, timeout=800, check=True)


@on_every_grid
def test_with_a_pipeline(grid: tuple[int, int]) -> None:
    run(
        Case(name, grid, TAILS[name], microbatches=2, mirrored=m, schedule=schedule)
        for name, m, schedule in product(CELLS, MIRRORED, SCHEDULES)
    )


@on_every_grid
def test_with_replicas(grid: tuple[int, int]) -> None:
    run(
        Case(name, grid, replicas=2, mirrored=m, schedule=schedule)
        for name, m, schedule in product(CELLS, MIRRORED, SCHEDULES)
    )


@pytest.mark.parametrize("name", CELLS)
def test_with_a_pipeline_replicas_and_mirrored_replicas_at_once(name: str) -> None:
    # Statistics over few pixels of one sample would blow rounding up over so many micro-batches.
    case = Case(name, (2, 2), TAILS[name], replicas=2, mirrored=True, microbatches=2, samples=2)
    run(replace(case, schedule=schedule) for schedule in SCHEDULES)
