"""Networks that nobody here wrote, on tiles: outputs and all gradients as in one process."""

from __future__ import annotations

import pytest

from tests.models.tiled_models import MODELS
from tests.models.tiles import rows

pytestmark = pytest.mark.models


def test_there_are_sixty() -> None:
    assert len(MODELS) == 60


@pytest.mark.parametrize("name", MODELS)
def test_tiles_give_the_outputs_and_gradients_of_one_process(name: str) -> None:
    for row in rows(name):
        assert row.result == "equal", row
