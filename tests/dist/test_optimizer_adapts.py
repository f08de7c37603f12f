"""Plans that follow what training becomes, over real processes."""

import pytest

from tests.support.cases import check, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("optimizer_adapts"))
def test_adapts(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)
