"""Runs the cases of programs/optimizer_training.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_training"))
def test_training(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
