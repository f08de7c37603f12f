"""``elastic.run(virtual_ranks=8)``: the bits of a training do not depend on the ranks that were there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import commsched as hvd
from tests.support.launch import elastic_hosts, run_ranks, start_ranks
from tests.support.needs import needs_horovod
from tests.support.virtual_training import trained

PROGRAM = Path(__file__).with_name("programs") / "virtual_ranks.py"
STEPS = 50
pytestmark = pytest.mark.dist


@cache
def on_one_rank() -> str:
    hvd.init()
    try:
        found, sizes = trained("gradients", STEPS)
    finally:
        hvd.shutdown()
    assert sizes == [1] * STEPS
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks(ranks: int) -> None:
    """Eight virtual ranks on three ranks are 3, 3 and 2: no rank's gradients are a half of the tree."""
    for result in run_ranks(PROGRAM, ranks, [str(STEPS), "gradients,parameters"], check=True):
        found = json.loads(result.stdout.splitlines()[-1])
        assert found == {gather: [on_one_rank(), [ranks] * STEPS] for gather in ("gradients", "parameters")}


@needs_horovod
@pytest.mark.parametrize("gather", ["gradients", "parameters"])
def test_ranks_that_die_and_come(tmp_path: Path, gather: str) -> None:
    hosts, launcher = elastic_hosts(tmp_path, "localhost:2", "127.0.0.1:2")
    arguments, env = [str(STEPS), gather, hosts], {"COMMSCHED_TIMEOUT": "300"}
    with start_ranks(PROGRAM, 4, arguments, env, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    assert results[0].stdout, shown
    found, sizes = json.loads(results[0].stdout.splitlines()[-1])[gather]
    assert list(dict.fromkeys(sizes)) == [4, 2, 3] and len(sizes) == STEPS, shown
    assert found == on_one_rank(), shown
