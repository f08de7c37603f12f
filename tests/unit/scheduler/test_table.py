"""The table of ``python -m scheduler.table``, and the copy of it in the documentation."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scheduler.profiles import names, shipped
from scheduler.table import RATIOS, STARTUPS, Cell, main, measure

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "policies.csv"


def documented() -> dict[tuple[str, str, str], dict[str, float]]:
    """The rows of the documented table: profile, ratio and start-up, and the figures by column."""
    lines = [line for line in RESULTS.read_text().splitlines() if not line.startswith("#")]
    rows = [list(row.items()) for row in csv.DictReader(lines)]
    return {tuple(v for _, v in row[:3]): {k: float(v) for k, v in row[3:]} for row in rows}  # type: ignore[misc]


def test_the_document_holds_every_cell_and_no_miss() -> None:
    rows = documented()
    expected = {(p, f"{r:g}", f"{s * 1e6:g}") for p in names() for r in RATIOS for s in STARTUPS}
    assert set(rows) == expected
    for (profile, ratio, startup), row in rows.items():
        policies = {name: value for name, value in row.items() if name not in ("startup_bound", "buckets")}
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
    assert cell.startup_bound == pytest.approx(row["startup_bound"], abs=0.0006)


def test_misses_are_named() -> None:
    cell = Cell("made up", 1.5, 2e-4, {"dear": 1.05, "optimal": 1.06}, 1.0, 9)
    assert list(cell.misses()) == [
        "made up, ratio 1.5, start-up 200 us: optimal is at 1.0600 of the bound, not within 1.05",
        "made up, ratio 1.5, start-up 200 us: optimal is at 1.060000 of the bound, dear at 1.050000",
    ]
    assert not list(Cell("made up", 3.0, 2e-4, {"dear": 1.2, "optimal": 1.2}, 1.0, 9).misses())
    assert list(Cell("made up", 3.0, 0.0, {"dear": 1.03, "optimal": 1.03}, 1.0, 9).misses())


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("# title: kept\nreplaced\n")
    assert main(["vgg16", "--ratios", "0.3", "3", "--startups", "2e-5", "--csv", str(table)]) == 0
    head, names, first, _ = table.read_text().splitlines()
    assert head == "# title: kept" and names.startswith("profile,ratio,startup_us,sequential,wfbp,")
    assert first.startswith("vgg16,0.3,20,1.") and len(first.split(",")) == len(names.split(","))
    out = capsys.readouterr().out
    assert out.startswith("| profile | ratio | startup_us | sequential | wfbp |")
    assert "\n| vgg16 | 0.3 | 20 | 1." in out and "\n| vgg16 | 3 | 20 | 1." in out
    assert "2 cells, 0 goals missed" in out
    assert main(["no_such_model"]) == 2
    assert "no_such_model" in capsys.readouterr().err
