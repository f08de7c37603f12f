"""Real training with a peer and schedules equals training in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_module
from tests.support.launch import PATIENCE

pytestmark = pytest.mark.dist


def converge(folder: Path, *arguments: str, patience: float = PATIENCE) -> list[dict[str, Any]]:
    """The runs; their losses and accuracies equal plain training's, or the command would have failed."""
    out, picture = folder / "runs.json", folder / "curves.png"
    files = ("--json", str(out), "--png", str(picture))
    done = run_module("dnn_bench", "converge", *arguments, *files, ranks=4, patience=patience)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    return runs


def test_digits_with_a_peer_and_schedules(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    what = ("--task", "digits", "--workers", "2", "--baseline", "ddp,dear,auto", "--steps", "80")
    runs = {run["baseline"]: run for run in converge(tmp_path, *what)}
    assert set(runs) == {"plain", "ddp", "dear", "auto"}
    assert runs["plain"]["accuracy"] > 0.8 and runs["plain"]["losses"][-1] < runs["plain"]["losses"][0] / 2
    assert runs["dear"]["digest"] == runs["auto"]["digest"]


@pytest.mark.slow
def test_a_text_with_four_workers(tmp_path: Path) -> None:
    what = ("--task", "text", "--workers", "4", "--baseline", "pipedap,auto", "--steps", "12")
    plain, *runs = converge(tmp_path, *what)
    assert plain["baseline"] == "plain" and len(plain["losses"]) == 12
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]
    assert [(run["baseline"], run["workers"]) for run in runs] == [("pipedap", 4), ("auto", 4)]
    assert runs[0]["digest"] == runs[1]["digest"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_tasks_with_every_schedule_and_number_of_workers(tmp_path: Path) -> None:
    """At one number of workers, all schedules give the same bits."""
    pytest.importorskip("sklearn")
    runs = converge(tmp_path, "--steps", "60", patience=1700.0)
    for task in ("digits", "text"):
        for workers in (1, 2, 3, 4):
            same = [run for run in runs if (run["task"], run["workers"]) == (task, workers)]
            same = [run for run in same if run["baseline"] != "plain"]
            assert len(same) >= 7 and len({run["digest"] for run in same}) == 1
