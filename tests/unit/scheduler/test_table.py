"""The table of ``python -m scheduler.table``, and the copy of it in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.profiles import names, shipped
from scheduler.table import RATIOS, STARTUPS, Cell, main, measure

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "policies.md"


def documented() -> dict[tuple[str, str, str], dict[str, float]]:
    """The rows of the documentation's tables: profile, ratio and start-up, and the figures by column."""
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    profile, head = "", []
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("### "):
            profile = line[4:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "ratio":
            head = cells
        elif line.startswith("|") and head and cells[0][0].isdigit() and profile in names():
            rows[profile, cells[0], cells[1]] = dict(zip(head[2:], map(float, cells[2:]), strict=True))
    return rows


def test_the_document_holds_every_cell_and_no_miss() -> None:
    rows = documented()
    expected = {(p, f"{r:g}", f"{s * 1e6:g}") for p in names() for r in RATIOS for s in STARTUPS}
    assert set(rows) == expected
    for (profile, ratio, startup), row in rows.items():
        policies = {name: value for name, value in row.items() if " " not in name and name != "buckets"}
        cell = Cell(profile, float(ratio), float(startup) * 1e-6, policies, 1.0, 1)
        misses = [text for text in cell.misses() if "not within" in text]
        assert misses == []
        assert row["optimal"] <= min(policies.values()) + 0.0006  # the others are rounded to three digits


@pytest.mark.parametrize(("profile", "ratio", "startup"), [("vgg16", 1.0, 2e-4), ("bert_base", 1.5, 2e-4)])
def test_the_document_is_up_to_date(profile: str, ratio: float, startup: float) -> None:
    cell = measure(shipped(profile), ratio, startup)
    row = documented()[profile, f"{ratio:g}", f"{startup * 1e6:g}"]
    assert list(cell.misses()) == []
    for name, value in cell.ratios.items():
        assert value == pytest.approx(row[name], abs=0.0006), name
    assert cell.startup_bound == pytest.approx(row["bound with start-up"], abs=0.0006)


def test_misses_are_named() -> None:
    cell = Cell("made up", 1.5, 2e-4, {"dear": 1.05, "optimal": 1.06}, 1.0, 9)
    assert list(cell.misses()) == [
        "made up, ratio 1.5, start-up 200 us: optimal is at 1.0600 of the bound, not within 1.05",
        "made up, ratio 1.5, start-up 200 us: optimal is at 1.060000 of the bound, dear at 1.050000",
    ]
    assert not list(Cell("made up", 3.0, 2e-4, {"dear": 1.2, "optimal": 1.2}, 1.0, 9).misses())
    assert list(Cell("made up", 3.0, 0.0, {"dear": 1.03, "optimal": 1.03}, 1.0, 9).misses())


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vgg16", "--ratios", "0.3", "3", "--startups", "2e-5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("### vgg16\n\n| ratio | start-up (us) | sequential | wfbp |")
    assert "\n| 0.3 | 20 | 1." in out and "\n| 3 | 20 | 1." in out
    assert "2 cells, 0 goals missed" in out
    assert main(["no_such_model"]) == 2
    assert "no_such_model" in capsys.readouterr().err
