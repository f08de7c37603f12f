"""docs/api.md shows the public names as the code has them."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_public_names_is_up_to_date() -> None:
    written = (ROOT / "docs" / "api.md").read_text()
    made = runpy.run_path(str(ROOT / "docs" / "api_page.py"))["page"]()
    assert made == written, "run: python docs/api_page.py"
