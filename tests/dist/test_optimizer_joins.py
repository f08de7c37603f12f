"""Runs the cases of programs/optimizer_joins.py, with Horovod as the carrier of the collectives."""

import pytest

from tests.support.cases import check, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "program, ranks, name", [row for row in parameters("optimizer_joins") if row.values[1] == 2]
)
def test_joins_over_horovod(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name, launcher="horovodrun")
