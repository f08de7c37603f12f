"""Links on the pages lead to files of this checkout, and to headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links(text: str) -> list[str]:
    """Targets of links and pictures, without those in code and those to other sites."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def headings(text: str) -> set[str]:
    """Anchors as GitHub makes them: small letters, words joined by -, no other signs."""
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    wrong = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page, page.read_text())


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title: `code`\n")
    text = "# Here\n[a](other.md#a-title-code) [b](#here) [c](https://x.y) `[d](none)`\n"
    text += "[e](none.md) ![f](other.md#b)"
    (tmp_path / "page.md").write_text(text)
    assert broken(tmp_path / "page.md", text) == ["none.md", "other.md#b"]
