"""Every model on every grid, with a pipeline, with data parallelism and with mirrored replicas (GEMS)."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.support.launch import run_ranks
from tests.support.spatial_stages import CELLS, GRIDS, Case, with_a_pipeline, with_everything, with_replicas

pytestmark = [pytest.mark.dist, pytest.mark.slow]
on_every_grid = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")


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


def run(chosen: list[Case]) -> None:
    assert len({case.ranks for case in chosen}) == 1, "cases of one launch need equally many ranks"
    text = json.dumps([asdict(case) for case in chosen])
    run_ranks(run_cases, chosen[0].ranks, env={"CASES": text}, timeout=800, check=True)


@on_every_grid
def test_with_a_pipeline(grid: tuple[int, int]) -> None:
    run(with_a_pipeline(grid))


@on_every_grid
def test_with_replicas(grid: tuple[int, int]) -> None:
    run(with_replicas(grid))


@pytest.mark.parametrize("name", CELLS)
def test_with_a_pipeline_replicas_and_mirrored_replicas_at_once(name: str) -> None:
    run(with_everything(name))
