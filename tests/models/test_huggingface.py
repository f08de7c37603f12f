"""Runs the cases of programs/huggingface.py, which see."""

import pytest

from tests.support.cases import check, parameters

pytestmark = pytest.mark.models


@pytest.mark.parametrize("program, ranks, name", parameters("huggingface"))
def test_huggingface(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name, launcher="torchrun")
