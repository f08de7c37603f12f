"""Runs the files of examples/ that need no further library; tests/models/test_examples.py runs the others.

pytest -s tests/dist/test_examples.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, NEED_LIBRARIES, train

pytestmark = [pytest.mark.dist, pytest.mark.quick]
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_LIBRARIES])
def test_it_trains(name: str, tmp_path: Path) -> None:
    train(name, tmp_path)


def test_they_are_short_and_the_readme_names_them() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    for name in NAMES:
        lines = len((EXAMPLES / f"{name}.py").read_text().splitlines())
        assert lines <= 60, f"examples/{name}.py has {lines} lines"
        assert f"examples/{name}.py" in readme
