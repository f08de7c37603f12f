"""Runs the cases of programs/optimizer_tied.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_tied"))
def test_tied_weights(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
