"""Runs the cases of programs/replicas.py, which see."""

from __future__ import annotations

import pytest

from tests.support.cases import check, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("replicas"))
def test_replicas(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
