"""Runs the cases of programs/spatial_runs.py, which see; and a rank that dies."""

from __future__ import annotations

import pytest

from tests.support.cases import check, parameters
from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("spatial_runs"))
def test_tiles(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


def dies_in_the_forward() -> None:
    import os
    import sys

    import torch
    import torch.distributed as dist
    import torch.nn as nn

    from commsched import spatial

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = spatial.shard(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3)), grid=(1, 3), timeout=900)
    if dist.get_rank() == 1:
        model[1].register_forward_pre_hook(lambda *_: os._exit(3))
    try:
        model(spatial.scatter(torch.zeros(1, 1, 9, 9)))
    except spatial.CommError as error:
        sys.stdout.write(str(error))
        sys.stdout.flush()
    os._exit(0)


def test_a_dead_rank_is_named_at_once() -> None:
    results = run_ranks(dies_in_the_forward, 3)
    assert [result.returncode for result in results] == [0, 3, 0]
    for rank in (0, 2):
        said = results[rank].stdout
        assert "Conv2d" in said and "has lost rank 1" in said, said
