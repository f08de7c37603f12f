"""Tables of measurements: each one in docs/results says how it was measured, and can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from dnn_bench.report import results

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "results"
TABLE = """\
# title: Steps
# command: python -m dnn_bench compare
# unit: ms
# label: model hosts
# bars: ddp auto
# axis: ms per step
# where: hosts=2
# line: 1
model,hosts,ddp,auto
mlp,2,1500,1200
bert,2,,900
bert,4,1,1
"""


def test_a_table_is_drawn_beside_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "steps.csv").write_text(TABLE)
    assert results.main([str(tmp_path)]) == 0
    drawn = (tmp_path / "steps.svg").read_text()
    for text in ("Steps", "ms per step", "mlp 2", "bert 2", "ddp", "auto"):
        assert f">{text}<" in drawn
    assert "bert 4" not in drawn


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# unit: ms\n", "", "lacks the lines # unit: ..."),
        ("# bars: ddp auto", "# bars: ddp horovod", "has no column horovod"),
        ("hosts=2", "hosts=3", "has no row to draw"),
    ],
)
def test_what_a_table_lacks_is_told(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.csv").write_text(TABLE.replace(old, new))
    assert results.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_tables_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main([str(tmp_path)]) == 2
    assert "holds no CSV file" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_the_tables_of_the_docs_are_whole(path: Path) -> None:
    assert results.read(path).drawn
    assert path.with_suffix(".svg").exists(), "draw it: python -m dnn_bench results"
