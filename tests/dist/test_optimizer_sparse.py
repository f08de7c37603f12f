"""Runs the cases of programs/optimizer_sparse.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_sparse"))
def test_sparse(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
