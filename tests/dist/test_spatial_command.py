"""`python -m dnn_bench spatial`: every mode trains, under mpirun as well, and to the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_module
from tests.support.launch import ROOT, clean_environment, launcher_command
from tests.support.needs import needs

pytestmark = pytest.mark.dist
SMALL = ["--image-size", "64", "--num-filters", "4", "--warmup", "0", "--iterations", "2"]


def spatial(text: str, file: Path, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    words = ["spatial", *SMALL, *text.split(), "--json", str(file)]
    if before is None:
        return run_module("dnn_bench", *words)
    return subprocess.run(
        [*before, sys.executable, "-m", "dnn_bench", *words],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )


def losses(text: str, tmp_path: Path, before: list[str] | None = None) -> list[float]:
    done = spatial(text, tmp_path / "report.json", before)
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout and "step 2/2" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["peak_mib"]) == report["ranks"]
    found: list[float] = report["losses"]
    return found


@needs("mpirun")
@pytest.mark.parametrize(
    ("model", "tiles"), [("unet --num-layers 2", 2), pytest.param("amoebanet", 4, marks=pytest.mark.slow)]
)
def test_tiles_and_a_stage_under_mpirun_are_one_process(tmp_path: Path, model: str, tiles: int) -> None:
    alone = losses(f"--model {model} --mode lp --split-size 1", tmp_path)
    text = (
        f"--model {model} --num-spatial-parts {tiles} --slice-method vertical --split-size 2 --spatial-size 1"
    )
    assert losses(text, tmp_path, launcher_command("mpirun", tiles + 1)) == pytest.approx(alone, rel=1e-4)


def test_mirrored_replicas_with_options_of_mpi4dl_are_one_process(tmp_path: Path) -> None:
    alone = losses("--model unet --num-layers 2 --mode lp --split-size 1 --batch-size 4 --parts 4", tmp_path)
    text = "--model unet --num-layers 2 --mode gems+sp --num-spatial-parts 2 --slice-method horizontal"
    found = losses(f"{text} --batch-size 2 --parts 2 --halo-D2 --fused-layers 3 --balance 4,2", tmp_path)
    assert found == pytest.approx(alone, rel=1e-4)


@needs("mpirun")
def test_a_wrong_number_of_ranks_is_an_error(tmp_path: Path) -> None:
    text = "--model resnet --num-spatial-parts 4 --split-size 2 --spatial-size 1"
    done = spatial(text, tmp_path / "none", launcher_command("mpirun", 2))
    assert done.returncode == 2 and "needs 5 ranks, and the launcher started 2; use -np 5" in done.stderr


def test_help_and_bad_options() -> None:
    done = run_module("dnn_bench", "spatial", "--help")
    assert done.returncode == 0 and "--num-spatial-parts" in done.stdout
    done = run_module("dnn_bench", "spatial", "--parts", "3")
    assert done.returncode == 2 and done.stderr.startswith("error: --parts 3 must divide")
