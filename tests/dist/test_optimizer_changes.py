"""Runs the cases of programs/optimizer_changes.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_changes"))
def test_changes(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
