"""Runs the cases of programs/optimizer_masters.py."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_masters"))
def test_optimizer_masters(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
