"""Runs the cases of tests/dist/programs/split_models.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.models, pytest.mark.dist]


@pytest.mark.parametrize("program, ranks, name", parameters("split_models"))
def test_split_models(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
