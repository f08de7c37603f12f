"""Runs the cases of programs/optimizer_rows.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_rows"))
def test_rows(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
