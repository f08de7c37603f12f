"""Runs the cases of tests/dist/programs/library_models.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = [pytest.mark.models, pytest.mark.dist]


@pytest.mark.parametrize("program, ranks, name", parameters("library_models"))
def test_library_models(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
