"""Runs the files of examples/ that need Hugging Face's libraries or Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import NEED_LIBRARIES, train

pytestmark = [pytest.mark.models]


@pytest.mark.parametrize("name", NEED_LIBRARIES)
def test_it_trains(name: str, tmp_path: Path) -> None:
    train(name, tmp_path)
