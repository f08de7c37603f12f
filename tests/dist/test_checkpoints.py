"""``commsched.save`` and ``load`` on real ranks, also at another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import PROGRAMS
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
