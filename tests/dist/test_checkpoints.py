"""``commsched.save`` and ``load`` on real ranks, also at another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commsched.checkpoint import load
from tests.support.cases import PROGRAMS
from tests.support.checkpoints import alone
from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist


def said(ranks: int, what: str, folder: Path) -> list[str]:
    """What all ranks print alike."""
    results = run_ranks(PROGRAMS / "checkpoints.py", ranks, [what, str(folder)], check=True)
    lines = {result.stdout for result in results}
    assert len(lines) == 1, lines
    return lines.pop().splitlines()


def test_training_goes_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    whole = said(2, "first", tmp_path)
    assert len(whole) == 14 and all(line.endswith(" is right") for line in whole[2:])
    for ranks in (3, 1):
        assert said(ranks, "again", tmp_path) == whole[:2], f"another result on {ranks} ranks"


def ends_after_a_save() -> None:
    import sys

    import torch

    import commsched
    from tests.support.reference_run import some_profile

    commsched.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = commsched.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model=model,
        schedule="dear",
        bucket_mb=0.01,
        profile=some_profile(model),
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer._session.backend.puts_off = True
        optimizer.step()
    assert optimizer._session.round.pending
    saving = commsched.save({"model": model, "optimizer": optimizer, "steps": 3}, sys.argv[1])
    assert not saving._arrivals.is_whole


def test_what_is_on_its_way_when_the_program_ends_is_saved(tmp_path: Path) -> None:
    run_ranks(ends_after_a_save, 2, [str(tmp_path)], check=True)
    with alone():
        found = load({}, tmp_path)
    assert found is not None and found["steps"] == 3 and len(found["model"]) == 8
