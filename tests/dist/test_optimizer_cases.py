"""Runs the cases of every programs/optimizer_*.py, each on the numbers of ranks that it names.

    pytest tests/dist/test_optimizer_cases.py -k optimizer_sparse
"""

import pytest

from tests.support.cases import PROGRAMS, check, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters(*sorted(p.stem for p in PROGRAMS.glob("optimizer_*.py"))))
def test_optimizer(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
