"""Runs the cases of programs/optimizer_joins.py, over both carriers of the collectives."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_joins"))
def test_joins(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


@pytest.mark.parametrize(
    "program, ranks, name", [row for row in parameters("optimizer_joins") if row.values[1] == 2]
)
def test_joins_over_horovod(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name, launcher="horovodrun")
