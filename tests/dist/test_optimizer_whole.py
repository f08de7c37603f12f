"""Runs the cases of programs/optimizer_whole.py."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_whole"))
def test_whole(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
